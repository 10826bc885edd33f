{{/* Where a model is, and what a pod needs to get at it. */}}

{{/* paceline.modelPath (dict "role" "target" "config" $pool) */}}
{{- define "paceline.modelPath" -}}
{{- $model := .config.model -}}
{{- if eq $model.source "bundled" -}}
{{- $model.path | default (printf "/opt/paceline/models/python-%s" .role) -}}
{{- else -}}
{{- list "/models" (trimAll "/" $model.path) | compact | join "/" -}}
{{- end -}}
{{- end }}

{{/* These take a pool's `model`. */}}
{{- define "paceline.modelVolumes" -}}
{{- if eq .source "claim" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .claim.name | quote }}
    readOnly: true
{{- else if eq .source "download" }}
- name: model
  emptyDir: {{ include "paceline.emptyDir" .download.sizeLimit }}
{{- with .download.tokenSecret }}
- name: hub
  secret:
    secretName: {{ . | quote }}
    items:
      - {key: token, path: token}
{{- end }}
{{- else if eq .source "image" }}
- name: model
  image:
    reference: {{ .image.reference | quote }}
    pullPolicy: {{ .image.pullPolicy }}
{{- end }}
{{- end }}

{{- define "paceline.modelMounts" -}}
{{- if ne .source "bundled" }}
- name: model
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}

{{/* What fetches the model before the server starts: paceline.modelDownload (dict "root" $ "config" $pool) */}}
{{- define "paceline.modelDownload" -}}
{{- $download := .config.model.download -}}
{{- if eq .config.model.source "download" }}
- name: download
  image: {{ include "paceline.image" (dict "root" .root "image" .config.image) | quote }}
  imagePullPolicy: {{ .config.image.pullPolicy }}
  command: [python, -c]
  args:
    - |
      {{- .root.Files.Get "files/download.py" | trim | nindent 6 }}
    - {{ $download.repository | quote }}
    - {{ $download.revision | quote }}
    - /models
  env:
    - name: HF_HOME
      value: /tmp/huggingface
    - name: HF_HUB_DISABLE_TELEMETRY
      value: "1"
    {{- if $download.tokenSecret }}
    - name: HF_TOKEN_PATH
      value: /hub/token
    {{- end }}
    {{- with .config.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .config.resources | nindent 4 }}
  securityContext:
    {{- include "paceline.securityContext" .config.containerSecurityContext | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: model
      mountPath: /models
    {{- if $download.tokenSecret }}
    - name: hub
      mountPath: /hub
      readOnly: true
    {{- end }}
    {{- with .config.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}
