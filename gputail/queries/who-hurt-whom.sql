-- Which process slowed down which workload, how often, and by how many milliseconds in all.
SELECT
  node,
  culprit_comm,
  culprit_pid,
  workload AS victim,
  cause,
  count(*) AS requests,
  round(sum(cause_ns) / 1e6, 3) AS total_ms,
  round(max(cause_ns) / 1e6, 3) AS worst_ms
FROM contributions
WHERE culprit_pid IS NOT NULL
GROUP BY node, culprit_comm, culprit_pid, workload, cause
ORDER BY total_ms DESC, node, victim, cause
LIMIT 100
