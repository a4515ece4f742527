-- The hundred requests that took longest beyond what is usual.
SELECT
  node,
  time,
  workload,
  pid,
  round(duration_ns / 1e6, 3) AS took_ms,
  round(excess_ns / 1e6, 3) AS excess_ms,
  cause,
  confidence
FROM requests
WHERE outlier
ORDER BY excess_ns DESC, node, time
LIMIT 100
