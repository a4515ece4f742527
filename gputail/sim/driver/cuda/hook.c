/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Only for tests: something to do inside this thread's next driver call, be it another driver call, a wait, or to leave
 * by longjmp. It is no name of CUDA.
 */
#include "driver.h"

static __thread void (*next_hook)(void *);
static __thread void *hook_data;

/* Calls that look up a stream or check the context run the hook there. */
void run_hook(void)
{
	void (*hook)(void *) = next_hook;

	if (!hook)
		return;
	next_hook = NULL; /* before it is called: it may not come back */
	hook(hook_data);
}

API void gputail_sim_on_next_call(void (*hook)(void *), void *data)
{
	hook_data = data;
	next_hook = hook;
}
