"""A recording told on a page: as text, as HTML, and as a trace for Perfetto.

tails.py and gathering.py take request records and add up what the page says; windows.py and timeline.py take the calls around
the worst requests; stories.py has the words. text.py, web.py with plots.py, and perfetto.py are the three outputs.
"""
