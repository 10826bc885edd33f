{{/*
From values to pools: what is common, then a role's section, then a pool's.

These return YAML; callers read it with fromYaml. Numbers come out of that as floats, so whoever
prints one says int64.
*/}}

{{/* The orchestrator's configuration. */}}
{{- define "paceline.orchestrator" -}}
{{- mustMergeOverwrite (deepCopy .Values.common) (deepCopy .Values.orchestrator) | toYaml -}}
{{- end }}

{{/*
A gateway's: of what is common to gRPC servers, what it knows; `make chart` lists that. It drains for
as long as a call may take, since over HTTP nobody can go on elsewhere with what is cut.
*/}}
{{- define "paceline.gateway" -}}
{{- $config := mustMergeOverwrite (deepCopy .Values.common) (deepCopy .Values.gateway) -}}
{{- $known := .Files.Get "files/gateway-settings.json" | fromJsonArray -}}
{{- range $name := keys $config.settings -}}
{{- if not (has $name $known) }}{{ $_ := unset $config.settings $name }}{{ end -}}
{{- end -}}
{{- if kindIs "invalid" $config.drainSeconds -}}
{{- $_ := set $config "drainSeconds" (include "paceline.callSeconds" $config | float64 | ceil) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* What is said about pods, by its place in values: `common`, roles and pools. */}}
{{- define "paceline.sections" -}}
{{- $sections := dict "common" .Values.common -}}
{{- range $role := list "orchestrator" "gateway" "target" "drafter" -}}
{{- $_ := set $sections $role (index $.Values $role) -}}
{{- range $pool, $own := (index $.Values $role).pools | default dict -}}
{{- $_ := set $sections (printf "%s.pools.%s" $role $pool) ($own | default dict) -}}
{{- end -}}
{{- end -}}
{{- toYaml $sections -}}
{{- end }}

{{/* Pool name to configuration: paceline.pools (list $ "target") */}}
{{- define "paceline.pools" -}}
{{- $root := index . 0 -}}
{{- $role := index $root.Values (index . 1) -}}
{{- $pools := dict -}}
{{- if or (not (hasKey $role "enabled")) $role.enabled -}}
{{- range $name, $own := $role.pools | default (dict "default" dict) -}}
{{- $shared := mustMergeOverwrite (deepCopy $root.Values.common) (omit $role "pools" | deepCopy) -}}
{{- $_ := set $pools $name (mustMergeOverwrite $shared (deepCopy ($own | default dict))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end }}

{{/*
Equation 1 of the DSI paper: with so many targets no verification waits for one.
ceil(target / (lookahead * drafter)) in integers, since floats are one too many now and then.
Empty if a latency is unknown.
*/}}
{{- define "paceline.neededTargets" -}}
{{- $target := int64 .targetMicroseconds -}}
{{- $block := mul (int64 .lookahead) (int64 .drafterMicroseconds) -}}
{{- if and $target $block -}}
{{- div (sub (add $target $block) 1) $block -}}
{{- end -}}
{{- end }}

{{/* Pods of a pool that is not autoscaled. */}}
{{- define "paceline.replicas" -}}
{{- if kindIs "invalid" .replicas -}}
{{- include "paceline.neededTargets" .latency | default 2 -}}
{{- else -}}
{{- int64 .replicas -}}
{{- end -}}
{{- end }}

{{/* The target pool that an autoscaler scales; empty without one. */}}
{{- define "paceline.scaledPool" -}}
{{- if ne .Values.autoscaling.mode "none" -}}
{{- .Values.autoscaling.pool | default (include "paceline.pools" (list . "target") | fromYaml | keys | first) -}}
{{- end -}}
{{- end }}

{{/* Targets of the other pools, which keep their number. */}}
{{- define "paceline.fixedTargets" -}}
{{- $scaled := include "paceline.scaledPool" . -}}
{{- $count := 0 -}}
{{- range $name, $pool := include "paceline.pools" (list . "target") | fromYaml -}}
{{- if ne $name $scaled -}}
{{- $count = add $count (include "paceline.replicas" $pool) -}}
{{- end -}}
{{- end -}}
{{- $count -}}
{{- end }}

{{/* The fewest targets that an autoscaler may leave of its pool: paceline.minReplicas (list $ $pool) */}}
{{- define "paceline.minReplicas" -}}
{{- $root := index . 0 -}}
{{- $wanted := $root.Values.autoscaling.minReplicas -}}
{{- if kindIs "invalid" $wanted -}}
{{- $needed := include "paceline.neededTargets" (index . 1).latency | default 1 -}}
{{- sub $needed (include "paceline.fixedTargets" $root) | max 1 -}}
{{- else -}}
{{- int64 $wanted -}}
{{- end -}}
{{- end }}

{{/* Seconds that a call may take at a server, by its settings or by the servers' own default. */}}
{{- define "paceline.callSeconds" -}}
{{- .settings.call_limit_seconds | default 600 -}}
{{- end }}

{{/* The most bytes of a body at a gateway; 0 if a pod's variable has the number. */}}
{{- define "paceline.bodyBytes" -}}
{{- .settings.body_limit_bytes | default 16777216 | float64 | int64 -}}
{{- end }}

{{/*
Seconds from a pod's deletion to SIGKILL: the preStop sleep, the drain, and time for a forward that
cannot be given up and for the process to end.
*/}}
{{- define "paceline.graceSeconds" -}}
{{- add (int64 .preStopSleepSeconds) (int64 .drainSeconds) 15 -}}
{{- end }}

{{/* Seconds without progress until a rollout has failed: one pod may drain, and another load. */}}
{{- define "paceline.progressSeconds" -}}
{{- add (int64 (.startupSeconds | default 0)) (int64 (include "paceline.graceSeconds" .)) 600 -}}
{{- end }}

{{/* Settings as flags, one a line: paceline.flags $config.settings */}}
{{- define "paceline.flags" -}}
{{- range $name, $value := . -}}
{{- $flag := $name | replace "_" "-" -}}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else if and (kindIs "slice" $value) (has $name (list "engine_option" "lora")) }}
{{- range $value }}
- {{ printf "--%s=%s" $flag . | quote }}
{{- end }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $flag (join "," $value) | quote }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $flag $value | quote }}
{{- else }}
- {{ printf "--%s=%s" $flag (toJson $value) | quote }}
{{- end -}}
{{- end -}}
{{- end }}
