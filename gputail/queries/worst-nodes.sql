-- Nodes by the share of their requests' time that was lost beyond what is usual, with the cause that took most of it.
WITH spent AS (
  SELECT node, sum(duration_ns) AS total_ns FROM requests GROUP BY node
),
lost AS (
  SELECT node, cause, sum(cause_ns) AS lost_ns,
    row_number() OVER (PARTITION BY node ORDER BY sum(cause_ns) DESC, cause) AS place,
    sum(sum(cause_ns)) OVER (PARTITION BY node) AS node_lost_ns
  FROM contributions
  GROUP BY node, cause
)
SELECT
  spent.node,
  round(100.0 * coalesce(lost.node_lost_ns, 0) / spent.total_ns, 2) AS lost_percent,
  lost.cause AS top_cause,
  round(coalesce(lost.lost_ns, 0) / 1e6, 3) AS top_cause_ms
FROM spent LEFT JOIN lost ON spent.node = lost.node AND lost.place = 1
ORDER BY lost_percent DESC, spent.node
LIMIT 100
