-- Of each workload's time beyond what is usual: to which cause how much of it goes.
SELECT
  node,
  workload,
  cause,
  count(*) AS requests,
  round(sum(cause_ns) / 1e6, 3) AS total_ms,
  round(100.0 * sum(cause_ns) / sum(sum(cause_ns)) OVER (PARTITION BY node, workload), 1) AS percent
FROM contributions
GROUP BY node, workload, cause
ORDER BY node, workload, total_ms DESC, cause
