{{/* All objects of one role with a model: paceline.modelServers (list $ "target") */}}
{{- define "paceline.modelServers" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $pools := include "paceline.pools" . | fromYaml -}}
{{- range $name, $pool := $pools }}
{{- $id := dict "root" $root "role" $role "pool" $name "config" $pool }}
---
{{ include "paceline.modelDeployment" $id }}
---
apiVersion: v1
kind: Service
metadata:
  {{- include "paceline.metadata" $id | nindent 2 }}
spec:
  # Headless: each server has sessions of its own, so orchestrators call pods and not a balancer.
  clusterIP: None
  publishNotReadyAddresses: false
  selector:
    {{- include "paceline.selector" $id | nindent 4 }}
  ports:
    - name: grpc
      port: {{ (include "paceline.modelPorts" . | fromYaml).grpc }}
      targetPort: grpc
      protocol: TCP
      {{- if not $root.Values.tls.enabled }}
      appProtocol: kubernetes.io/h2c
      {{- end }}
{{ include "paceline.podDisruptionBudget" $id }}
{{- end }}
{{- /* One for the role, if some pool of it has none of the operator's. */}}
{{- $own := "" }}
{{- range $pools }}{{ if not .serviceAccountName }}{{ $own = "yes" }}{{ end }}{{ end }}
{{- if $own }}
{{ include "paceline.serviceAccount" (dict "root" $root "role" $role "config" (index $root.Values $role)) }}
{{- end }}
{{- end }}

{{- define "paceline.modelPorts" -}}
grpc: 50051
health: 50052
metrics: 9090
{{- end }}

{{- define "paceline.modelDeployment" -}}
{{- $pool := .config -}}
{{- $ports := include "paceline.modelPorts" . | fromYaml -}}
{{- $device := ternary "cuda" "cpu" (gt (int64 $pool.gpu.count) 0) -}}
{{- $flags := include "paceline.serverFlags" (merge (dict "ports" $ports) .) | fromYamlArray -}}
{{- $flags = append $flags (printf "--model=%s" (include "paceline.modelPath" .)) -}}
{{- $vllm := eq (toString $pool.settings.backend) "vllm" -}}
{{- $nodes := include "paceline.nodeCount" . | int64 -}}
{{- $isDivided := and $vllm (gt (mul $nodes (int64 $pool.gpu.count)) 1) -}}
{{- if and $isDivided (not (include "paceline.divides" $pool.settings.engine_option)) -}}
{{- $flags = append $flags (printf "--engine-option=tensor_parallel_size=%d" (int64 $pool.gpu.count)) -}}
{{- if gt $nodes 1 }}{{ $flags = append $flags (printf "--engine-option=pipeline_parallel_size=%d" $nodes) }}{{ end -}}
{{- end -}}
{{- if gt $nodes 1 -}}
{{- /* The controller's variables; Kubernetes puts them in. */}}
{{- $flags = append $flags (printf "--engine-option=nnodes=%d" $nodes) -}}
{{- $flags = concat $flags (list "--engine-option=node_rank=$(LWS_WORKER_INDEX)" "--engine-option=master_addr=$(LWS_LEADER_ADDRESS)") -}}
{{- $_ := set $pool "extraEnv" (prepend $pool.extraEnv (dict "name" "VLLM_HOST_IP" "valueFrom" (dict "fieldRef" (dict "fieldPath" "status.podIP")))) -}}
{{- end -}}
{{- if not (or $vllm (hasKey $pool.settings "device")) -}}
{{- $flags = append $flags (printf "--device=%s" $device) -}}
{{- end -}}
{{- if and .root.Values.tls.enabled $pool.settings.debug_calls -}}
{{- $flags = append $flags "--insecure" -}}
{{- end -}}
{{- $devices := dict -}}
{{- if gt (int64 $pool.gpu.count) 0 -}}
{{- $_ := set $devices $pool.gpu.resource (int64 $pool.gpu.count | toString) -}}
{{- end -}}
{{- /* The processes of a divided model speak to each other in shared memory, of which a pod has 64 MiB. */}}
{{- $volumes := include "paceline.modelVolumes" $pool.model | fromYamlArray -}}
{{- $mounts := include "paceline.modelMounts" $pool.model | fromYamlArray -}}
{{- if $isDivided -}}
{{- $volumes = append $volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" "8Gi")) -}}
{{- $mounts = append $mounts (dict "name" "shm" "mountPath" "/dev/shm") -}}
{{- end -}}
{{- $replicas := include "paceline.replicas" $pool -}}
{{- if and (eq .role "target") (eq .pool (include "paceline.scaledPool" .root)) -}}
{{- $replicas = "" -}}
{{- end -}}
{{- include (ternary "paceline.leaderWorkerSet" "paceline.deployment" (gt $nodes 1)) (merge (dict
  "args" $flags
  "ports" $ports
  "replicas" $replicas
  "token" false
  "startup" ""
  "devices" $devices
  "volumes" $volumes
  "mounts" $mounts
  "initContainers" (include "paceline.modelDownload" . | fromYamlArray)
) .) -}}
{{- end }}

{{/* "yes" if engine options say how a model is divided: a list of them, or one as text. */}}
{{- define "paceline.divides" -}}
{{- $options := ternary (list .) (. | default list) (kindIs "string" .) -}}
{{- range $options }}{{ if regexMatch "^-*(tensor|pipeline)[-_]parallel[-_]size=" . }}yes{{ end }}{{ end -}}
{{- end }}
