{{/*
One Deployment for all roles, so that none can forget a probe, a limit or a drain.

paceline.deployment takes a dict:
  root        $
  role, pool  orchestrators and gateways have no pool
  config      what `common`, the role and the pool say
  args        flags of this role, a list
  ports       name to number, beside health and metrics
  replicas    a number, or "" if an autoscaler decides
  token       whether pods may speak to the Kubernetes API
  startup     the health service that tells that start-up is over; "" is the whole server
  volumes, mounts, initContainers, devices   a model server's, lists and a dict
*/}}
{{- define "paceline.deployment" -}}
{{- $root := .root -}}
{{- $config := .config -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "paceline.metadata" . | nindent 2 }}
  {{- with $config.deploymentAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if ne (toString .replicas) "" }}
  replicas: {{ .replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  progressDeadlineSeconds: {{ include "paceline.progressSeconds" $config }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- include "paceline.rollout" $config.rollout | nindent 6 }}
  selector:
    matchLabels:
      {{- include "paceline.selector" . | nindent 6 }}
  template:
    {{- include "paceline.podTemplate" . | nindent 4 }}
{{- end }}

{{/* What a Deployment, or a LeaderWorkerSet, makes pods from. */}}
{{- define "paceline.podTemplate" -}}
{{- $root := .root -}}
{{- $config := .config -}}
metadata:
  labels:
    {{- /* Without the chart's version: its upgrade alone restarts no pod. */}}
    app.kubernetes.io/part-of: paceline
    {{- include "paceline.selector" . | nindent 4 }}
    {{- with $config.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    {{- merge (dict) $config.podAnnotations (dict "kubectl.kubernetes.io/default-container" .role) | toYaml | nindent 4 }}
spec:
  serviceAccountName: {{ include "paceline.serviceAccountName" . | quote }}
  automountServiceAccountToken: {{ .token }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "paceline.graceSeconds" $config }}
  securityContext:
    {{- include "paceline.podSecurityContext" $config.podSecurityContext | nindent 4 }}
  {{- with include "paceline.scheduling" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $root.Values.global.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with concat $config.extraInitContainers (.initContainers | default list) }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "paceline.image" (dict "root" $root "image" $config.image) | quote }}
      imagePullPolicy: {{ $config.image.pullPolicy }}
      command: [paceline, serve, {{ .role }}]
      args:
        {{- toYaml (concat .args (include "paceline.flags" $config.settings | fromYamlArray)) | nindent 8 }}
      {{- with $config.extraEnv }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- range $name, $number := .ports }}
        - name: {{ $name }}
          containerPort: {{ $number }}
          protocol: TCP
        {{- end }}
      {{- include "paceline.probes" . | nindent 6 }}
      {{- with int64 $config.preStopSleepSeconds }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ . }}
      {{- end }}
      resources:
        {{- include "paceline.resources" . | nindent 8 }}
      securityContext:
        {{- include "paceline.securityContext" $config.containerSecurityContext | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- if $root.Values.tls.enabled }}
        - name: tls
          mountPath: /tls
          readOnly: true
        {{- end }}
        {{- with concat .mounts $config.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $config.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {{ include "paceline.emptyDir" $config.temporarySizeLimit }}
    {{- if $root.Values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ index $root.Values.tls.secrets .role | quote }}
    {{- end }}
    {{- with concat .volumes $config.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Numbers or percentages. */}}
{{- define "paceline.rollout" -}}
maxSurge: {{ include "paceline.count" .maxSurge }}
maxUnavailable: {{ include "paceline.count" .maxUnavailable }}
{{- end }}

{{- define "paceline.count" -}}
{{- if kindIs "string" . }}{{ . | quote }}{{ else }}{{ int64 . }}{{ end -}}
{{- end }}

{{/* What the pod security level `restricted` demands of a pod. */}}
{{- define "paceline.podSecurityContext" -}}
{{- dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") | mustMergeOverwrite (deepCopy .) | toYaml -}}
{{- end }}

{{/* And of a container. */}}
{{- define "paceline.securityContext" -}}
{{- $strict := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "runAsNonRoot" true -}}
{{- $_ := set $strict "capabilities" (dict "drop" (list "ALL")) -}}
{{- mustMergeOverwrite $strict (deepCopy .) | toYaml -}}
{{- end }}

{{/* A directory as long as the pod, with room for so much if that is said. */}}
{{- define "paceline.emptyDir" -}}
{{- ternary (dict "sizeLimit" .) dict (ne . "") | toJson -}}
{{- end }}

{{- define "paceline.scheduling" -}}
{{- $config := .config -}}
{{- $selector := include "paceline.selector" . | fromYaml -}}
{{- range $name := list "priorityClassName" "runtimeClassName" -}}
{{- with index $config $name }}
{{ $name }}: {{ . | quote }}
{{- end }}
{{- end }}
{{- range $name := list "nodeSelector" "tolerations" "affinity" -}}
{{- with index $config $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $config.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  {{- $default := ternary dict (dict "labelSelector" (dict "matchLabels" $selector)) (hasKey . "labelSelector") }}
  {{- list (merge (dict) . $default) | toYaml | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{/*
Native gRPC probes of the plaintext health port. `liveness` is answered from the first moment; the
whole server is SERVING once it can work, which for an orchestrator depends on others.
*/}}
{{- define "paceline.probes" -}}
{{- if .ports.http }}
{{- include "paceline.httpProbes" . }}
{{- else }}
startupProbe:
  grpc:
    port: {{ .ports.health }}
    {{- with .startup }}
    service: {{ . }}
    {{- end }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ div (add (int64 (.config.startupSeconds | default 120)) 1) 2 }}
readinessProbe:
  grpc:
    port: {{ .ports.health }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  grpc:
    port: {{ .ports.health }}
    service: liveness
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (int64 .config.livenessSeconds) 10) }}
{{- end }}
{{- end }}

{{/* Of a gateway: it starts without an orchestrator, and is ready while one serves. */}}
{{- define "paceline.httpProbes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" .root.Values.tls.enabled -}}
startupProbe:
  httpGet: {path: /health/live, port: http, scheme: {{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /health/ready, port: http, scheme: {{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health/live, port: http, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (int64 .config.livenessSeconds) 10) }}
{{- end }}

{{/* A device is requested by its limit, and a quantity is text. */}}
{{- define "paceline.resources" -}}
{{- $resources := deepCopy .config.resources -}}
{{- with .devices -}}
{{- range $list := list "requests" "limits" -}}
{{- $_ := set $resources $list (merge (dict) $.devices (index $resources $list | default dict)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* Flags that every server has. */}}
{{- define "paceline.serverFlags" -}}
{{- $host := .root.Values.listenHost -}}
- --listen={{ $host }}:{{ .ports.grpc }}
- --health-listen={{ $host }}:{{ .ports.health }}
- --metrics-listen={{ $host }}:{{ .ports.metrics }}
- --drain-seconds={{ int64 .config.drainSeconds }}
{{- if .root.Values.tls.enabled }}
- --tls-certificate=/tls/tls.crt
- --tls-key=/tls/tls.key
{{- if .root.Values.tls.mutual }}
- --tls-client-authority=/tls/ca.crt
{{- end }}
{{- else }}
- --insecure
{{- end }}
{{- end }}

{{/* The address of a Service, from anywhere in the cluster. */}}
{{- define "paceline.host" -}}
{{- $root := index . 0 -}}
{{- printf "%s.%s.svc.%s" (include "paceline.name" .) $root.Release.Namespace $root.Values.clusterDomain -}}
{{- end }}
