{{/*
A target over several nodes: a LeaderWorkerSet (leaderworkerset.x-k8s.io), whose groups have a pod on
each node. A group's first pod is a target like any other. The others have a part of its model and
serve nothing, so no selector of the chart's may fit them: their label `name` is another one.

These take a pool's dict with root, role, pool and config.
*/}}

{{/* On how many nodes a pool's model is; a drafter's is on one. */}}
{{- define "paceline.nodeCount" -}}
{{- int64 (.config.nodes | default 1) -}}
{{- end }}

{{/* Another number of nodes is another object, since not every version of the controller lets it change. */}}
{{- define "paceline.groupsName" -}}
{{- include "paceline.name" (list .root (printf "%s-%s-nodes" (include "paceline.component" .) (include "paceline.nodeCount" .))) -}}
{{- end }}

{{/* What makes a pool's pods, for whoever scales them. */}}
{{- define "paceline.scaleTarget" -}}
{{- if gt (include "paceline.nodeCount" . | int64) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
name: {{ include "paceline.groupsName" . }}
{{- else -}}
apiVersion: apps/v1
kind: Deployment
name: {{ include "paceline.name" (list .root (include "paceline.component" .)) }}
{{- end -}}
{{- end }}

{{/* What selects all pods of a pool, those that serve nothing included; an orchestrator is one pod. */}}
{{- define "paceline.allPods" -}}
{{- if gt (include "paceline.nodeCount" . | int64) 1 -}}
leaderworkerset.sigs.k8s.io/name: {{ include "paceline.groupsName" . }}
{{- else -}}
{{- include "paceline.selector" . -}}
{{- end -}}
{{- end }}

{{/* Takes what paceline.deployment takes. */}}
{{- define "paceline.leaderWorkerSet" -}}
{{- $config := .config -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  {{- $suffix := printf "%s-%s-nodes" (include "paceline.component" .) (include "paceline.nodeCount" .) }}
  {{- include "paceline.metadata" (merge (dict "suffix" $suffix) .) | nindent 2 }}
  {{- with $config.deploymentAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if ne (toString .replicas) "" }}
  replicas: {{ .replicas }}
  {{- end }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      {{- include "paceline.rollout" $config.rollout | nindent 6 }}
  startupPolicy: LeaderCreated
  leaderWorkerTemplate:
    size: {{ include "paceline.nodeCount" . }}
    # A model that lacks a part computes nothing.
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "paceline.podTemplate" . | nindent 6 }}
    workerTemplate:
      {{- include "paceline.partTemplate" . | nindent 6 }}
{{- end }}

{{/*
The pods of a group behind the first: nothing listens in them. When one is to go, the controller ends
its whole group; after SIGTERM its server stays by itself until the first pod is gone.
*/}}
{{- define "paceline.partTemplate" -}}
{{- $pod := include "paceline.podTemplate" (merge (dict "app" "paceline-part") .) | fromYaml -}}
{{- $server := first $pod.spec.containers -}}
{{- range list "ports" "startupProbe" "readinessProbe" "livenessProbe" "lifecycle" }}{{ $_ := unset $server . }}{{ end -}}
{{- toYaml $pod -}}
{{- end }}

{{/* A group's pods speak to each other, on ports of vLLM's and the devices' own choice, and to nobody else. */}}
{{- define "paceline.groupPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "paceline.metadata" (merge (dict "suffix" (printf "%s-nodes" (include "paceline.component" .))) .) | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "paceline.allPods" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              {{- include "paceline.allPods" . | nindent 14 }}
  egress:
    - to:
        - podSelector:
            matchLabels:
              {{- include "paceline.allPods" . | nindent 14 }}
    {{- include "paceline.dnsEgress" .root | trim | nindent 4 }}
{{- end }}

{{/* A whole number that engine options give by name, or another; "" if a pod's variable has it. */}}
{{- define "paceline.engineNumber" -}}
{{- $options := first . -}}
{{- $options = ternary (list $options) ($options | default list) (kindIs "string" $options) -}}
{{- $found := toString (last .) -}}
{{- range $options -}}
{{- $key := regexFind "^[^=]*" . | trimPrefix "--" | replace "-" "_" -}}
{{- if eq $key (index $ 1) }}{{ $found = regexReplaceAll "^[^=]*=" . "" }}{{ end -}}
{{- end -}}
{{- ternary "" $found (contains "$(" $found) -}}
{{- end }}

{{/* The devices of all nodes are as many as the parts of the model. */}}
{{- define "paceline.validateNodes" -}}
{{- $where := .where -}}
{{- $nodes := include "paceline.nodeCount" . | int64 -}}
{{- $count := int64 .config.gpu.count -}}
{{- $options := .config.settings.engine_option -}}
{{- range $name := list "nnodes" "node_rank" "master_addr" -}}
{{- if include "paceline.engineNumber" (list $options $name "") -}}
{{- fail (printf "%s.settings.engine_option says %s, which the chart says itself: leave it out, and set %s.nodes" $where $name $where) -}}
{{- end -}}
{{- end -}}
{{- if gt $nodes 1 -}}
{{- if ne (toString .config.settings.backend) "vllm" -}}
{{- fail (printf "%s.nodes=%d: a server has its model on one device, unless vLLM divides it: set %s.settings.backend=vllm, or %s.nodes=1 and more replicas" $where $nodes $where $where) -}}
{{- end -}}
{{- if eq $count 0 -}}
{{- fail (printf "%s.nodes=%d without a device: set %s.gpu.count to the devices of one node" $where $nodes $where) -}}
{{- end -}}
{{- end -}}
{{- if and (include "paceline.divides" $options) (gt (mul $nodes $count) 0) -}}
{{- $tensor := include "paceline.engineNumber" (list $options "tensor_parallel_size" 1) -}}
{{- $pipeline := include "paceline.engineNumber" (list $options "pipeline_parallel_size" 1) -}}
{{- if and $tensor $pipeline (ne (mul (int64 $tensor) (int64 $pipeline)) (mul $nodes $count)) -}}
{{- fail (printf "%s.settings.engine_option divides the model into %s x %s parts (tensor_parallel_size x pipeline_parallel_size), and there are %d devices (%s.gpu.count on %d nodes): make them equal, or leave both options out" $where $tensor $pipeline (mul $nodes $count) $where $nodes) -}}
{{- end -}}
{{- end -}}
{{- end }}
