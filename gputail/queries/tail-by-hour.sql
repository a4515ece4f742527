-- The latency of each workload by hour, and what share of its requests were outliers.
SELECT
  node,
  hour,
  workload,
  count(*) AS requests,
  round(percentile_cont(0.5) WITHIN GROUP (ORDER BY duration_ns) / 1e6, 3) AS p50_ms,
  round(percentile_cont(0.99) WITHIN GROUP (ORDER BY duration_ns) / 1e6, 3) AS p99_ms,
  round(max(duration_ns) / 1e6, 3) AS worst_ms,
  round(100.0 * avg(CASE WHEN outlier THEN 1 ELSE 0 END), 2) AS outlier_percent
FROM requests
WHERE NOT incomplete
GROUP BY node, hour, workload
ORDER BY node, hour, workload
