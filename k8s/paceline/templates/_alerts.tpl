{{/*
The alerts, with what to do about each. README.md explains them.
paceline.alerts (dict "root" $ "scope" "what selects this release's series")
*/}}
{{- define "paceline.alerts" -}}
{{- $scope := .scope -}}
{{- $values := .root.Values.monitoring.prometheusRule -}}
- alert: PacelineNoTarget
  expr: (max(paceline_ready_servers{role="target", {{ $scope }}}) or vector(0)) == 0
  for: 2m
  labels: {severity: critical}
  annotations:
    summary: No target is ready, so nothing can be decoded
    description: Look at the target pods (pending, loading, failing), then at their logs. Orchestrators refuse requests until one is ready.
{{- if .root.Values.drafter.enabled }}
- alert: PacelineNoDrafter
  expr: (max(paceline_ready_servers{role="drafter", {{ $scope }}}) or vector(0)) == 0
  for: 5m
  labels: {severity: warning}
  annotations:
    summary: No drafter is ready, so drafts come from the text itself only
    description: Outputs are still right. Look at the drafter pods (pending, loading, failing), then at their logs.
{{- end }}
- alert: PacelineServerNotUsed
  expr: max by (role, standing) (paceline_servers{standing=~"other_.*|listed_twice|unreachable|bad_answer|failing|silent|too_old|refuses|unwatched", {{ $scope }}}) > 0
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: 'A {{ "{{ $labels.role }}" }} that runs gets no work: {{ "{{ $labels.standing }}" }}'
    description: Its device idles. The orchestrators' logs and `paceline info` name the server and the reason; docs/operations.md says what to do about each reason.
- alert: PacelineForwardHangs
  expr: max by (pod) (paceline_forward_overdue_seconds{{ "{" }}{{ $scope }}}) > 0
  for: 1m
  labels: {severity: warning}
  annotations:
    summary: '{{ "{{ $labels.pod }}" }} has a forward that does not end'
    description: The pod gets no work, and restarts after hang_limit_seconds. Look at its device (the node's log, nvidia-smi); if it happens again, remove the node.
- alert: PacelineErrors
  expr: |-
    sum(rate(paceline_rpcs_total{method="paceline.v1.OrchestratorService/Generate", code=~"INTERNAL|UNKNOWN|DATA_LOSS|UNAVAILABLE", {{ $scope }}}[5m]))
      > 0.01 * sum(rate(paceline_rpcs_total{method="paceline.v1.OrchestratorService/Generate", {{ $scope }}}[5m]))
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: More than one request in a hundred fails
    description: The orchestrators' logs name the reason by request id. UNAVAILABLE means that no target is ready or that orchestrators drain; INTERNAL is a bug.
- alert: PacelineGatewayErrors
  expr: |-
    sum(rate(paceline_http_requests_total{status=~"5..", {{ $scope }}}[5m]))
      > 0.01 * sum(rate(paceline_http_requests_total{{ "{" }}{{ $scope }}}[5m]))
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: More than one HTTP request in a hundred fails at the gateways
    description: The gateways' logs name the reason by request id. 502 means that orchestrators refuse the gateways' own key or certificate, 503 that none serves or has room, 504 that requests take too long; 500 is a bug.
- alert: PacelineDeadlines
  expr: |-
    sum(rate(paceline_rpcs_total{method="paceline.v1.OrchestratorService/Generate", code="DEADLINE_EXCEEDED", reason!="SLOW_CONSUMER", {{ $scope }}}[5m]))
      > 0.05 * sum(rate(paceline_rpcs_total{method="paceline.v1.OrchestratorService/Generate", {{ $scope }}}[5m]))
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: More than one request in twenty runs out of time
    description: There are too few targets for the load, a device became slow, or clients' deadlines are too short for their requests.
- alert: PacelineUnauthenticated
  expr: sum by (pod) (rate(paceline_rpcs_total{code=~"UNAUTHENTICATED|PERMISSION_DENIED", {{ $scope }}}[5m])) > 0.1
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: '{{ "{{ $labels.pod }}" }} refuses more than one call in ten seconds for its key or certificate'
    description: A key or a certificate was changed on one side only, such as a gateway's own, which is tried again each second; otherwise somebody tries keys.
- alert: PacelineRefusing
  expr: sum(rate(paceline_rpcs_total{method="paceline.v1.OrchestratorService/Generate", code="RESOURCE_EXHAUSTED", reason!="KEY_LIMIT", {{ $scope }}}[5m])) > 0
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: Requests are refused because there is no room
    description: Requests over a key's own limit do not count. Add targets, or raise the orchestrator's queue_limit or the targets' token_budget if they have memory left.
- alert: PacelineSlowFirstToken
  expr: histogram_quantile(0.95, sum by (le) (rate(paceline_time_to_first_token_seconds_bucket{{ "{" }}{{ $scope }}}[5m]))) > {{ $values.firstTokenSeconds }}
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: One request in twenty waits more than {{ $values.firstTokenSeconds }} s for its first token
    description: If calls queue at targets, add targets; otherwise look for long prompts, or for other work on the devices.
- alert: PacelineTargetsQueue
  expr: histogram_quantile(0.95, sum by (le) (rate(paceline_queue_seconds_bucket{role="target", {{ $scope }}}[5m]))) > {{ $values.queueSeconds }}
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: One call in twenty waits more than {{ $values.queueSeconds }} s for a target
    description: There are too few targets for the load. Add targets, or raise autoscaling.maxReplicas.
- alert: PacelineTargetMemoryFull
  expr: max(paceline_kv_cache_usage_perc{{ "{" }}{{ $scope }}}) > 0.75
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: A model server has reserved three quarters of its token budget
    description: One client alone gets at most four fifths, and its further sessions are refused. Add servers, or raise token_budget if they have memory left.
- alert: PacelineLowAcceptance
  expr: |-
    sum(rate(paceline_spec_decode_num_accepted_tokens_total{role="target", {{ $scope }}}[30m]))
      < {{ $values.acceptanceRate }} * sum(rate(paceline_spec_decode_num_draft_tokens_total{role="target", {{ $scope }}}[30m]))
  for: 30m
  labels: {severity: info}
  annotations:
    summary: Fewer than {{ mulf 100 $values.acceptanceRate }} % of the draft tokens are accepted
    description: Outputs are still right, but the drafter saves little time. Compare with `paceline check-pair`; a drafter that used to do better may have the wrong revision.
- alert: PacelineRepairs
  expr: sum by (kind) (rate(paceline_fallbacks_total{kind!="load_changed", {{ $scope }}}[10m])) > 0.1
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: Orchestrators repair more than one {{ "{{ $labels.kind }}" }} in ten seconds
    description: Tokens are not lost, but time is. The kind shows the cause; target_lost and session_lost during a rollout or a scale-down are normal.
- alert: PacelineSessionsLeft
  expr: |-
    sum(paceline_sessions_active{{ "{" }}{{ $scope }}}) > 0
      and sum(paceline_num_requests_running{role="", {{ $scope }}}) == 0
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: Sessions stay open although no request runs
    description: Leases should have ended them within seconds. Please report it with the model server's logs; restarting that pod frees them.
- alert: PacelineDiscoveryStale
  expr: max by (pod) (paceline_discovery_last_event_age_seconds{{ "{" }}{{ $scope }}}) > 540
  for: 1m
  labels: {severity: warning}
  annotations:
    summary: '{{ "{{ $labels.pod }}" }} has had no news of the model servers for ten minutes'
    description: It uses the servers that it knows, and finds no new ones. Check whether the Kubernetes API answers it, and at networkPolicy.apiServer.
- alert: PacelineNotScraped
  expr: max by (pod) (up{{ "{" }}{{ $scope }}}) == 0
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: '{{ "{{ $labels.pod }}" }} is not scraped by Prometheus'
    description: If no pod does, look at networkPolicy.metrics, which has to name the namespace of your Prometheus; otherwise at that pod.
{{- if eq .root.Values.autoscaling.mode "keda" }}
- alert: PacelineScalerNotAsked
  expr: min(paceline_scaler_asked_age_seconds{{ "{" }}{{ $scope }}}) > 240
  for: 1m
  labels: {severity: warning}
  annotations:
    summary: KEDA has not asked for the number of targets in five minutes
    description: The number of targets stays the same. Look at networkPolicy.keda, which has to name the namespace of KEDA, at the ScaledObject's conditions, and at the log of KEDA's operator.
{{- end }}
{{- if ne .root.Values.autoscaling.mode "none" }}
- alert: PacelineWantsMoreTargets
  expr: max(paceline_desired_verifiers_unlimited{{ "{" }}{{ $scope }}}) > {{ int64 .root.Values.autoscaling.maxReplicas }}
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: More targets are wanted than the {{ int64 .root.Values.autoscaling.maxReplicas }} that autoscaling.maxReplicas allows
    description: Raise it if there are devices, else requests will queue.
{{- end }}
{{- end }}
