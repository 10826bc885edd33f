{{- define "paceline.orchestratorPorts" -}}
grpc: 50050
health: 50052
metrics: 9090
{{- if ne .Values.autoscaling.mode "none" }}
scaler: 50053
{{- end }}
{{- end }}

{{/* The Service that clients call. */}}
{{- define "paceline.orchestratorService" -}}
{{- ternary "orchestrator-pods" "orchestrator" .Values.orchestrator.service.headless -}}
{{- end }}

{{/*
A headless Service, as discovery takes it: DNS needs the whole name.
paceline.serviceName (list $ "target-default")
*/}}
{{- define "paceline.serviceName" -}}
{{- if eq (index . 0).Values.orchestrator.discovery "dns" -}}
{{- include "paceline.host" . -}}
{{- else -}}
{{- include "paceline.name" . -}}
{{- end -}}
{{- end }}

{{/* Flags beside those that every server has. */}}
{{- define "paceline.orchestratorFlags" -}}
{{- $grpc := (include "paceline.modelPorts" . | fromYaml).grpc -}}
- --discovery={{ .Values.orchestrator.discovery }}
{{- range $role := list "target" "drafter" }}
{{- range $name, $_ := include "paceline.pools" (list $ $role) | fromYaml }}
- --{{ $role }}-service={{ include "paceline.serviceName" (list $ (printf "%s-%s" $role $name)) }}:{{ $grpc }}
{{- end }}
{{- end }}
{{- if .Values.orchestrator.keysSecret }}
- --api-keys=/keys/keys
{{- end }}
{{- if ne .Values.autoscaling.mode "none" }}
{{- include "paceline.scalingFlags" . }}
{{- end }}
{{- if .Values.tls.enabled }}
- --pool-tls-authority=/tls/ca.crt
{{- if .Values.tls.mutual }}
- --pool-tls-certificate=/tls/tls.crt
- --pool-tls-key=/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{/*
Orchestrators tell each other what their streams ask for, so that each of them answers for all. What
they say is how many targets the scaled pool shall have beside the others.
*/}}
{{- define "paceline.scalingFlags" -}}
{{- $scaler := (include "paceline.orchestratorPorts" . | fromYaml).scaler }}
- --scaler-listen={{ .Values.listenHost }}:{{ $scaler }}
- --peer-service={{ include "paceline.serviceName" (list $ "scaler") }}:{{ $scaler }}
{{- $pool := index (include "paceline.pools" (list $ "target") | fromYaml) (include "paceline.scaledPool" .) }}
- --verifier-lookahead={{ int64 $pool.latency.lookahead }}
- --fixed-verifiers={{ include "paceline.fixedTargets" . }}
- --least-verifiers={{ include "paceline.minReplicas" (list $ $pool) }}
- --most-verifiers={{ int64 .Values.autoscaling.maxReplicas }}
{{- end }}
