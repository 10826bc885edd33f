{{/*
Names and labels.

A name is a release's with a suffix, at most 46 characters, so that a pod's (17 more) fits into a
DNS label. What would be longer keeps its beginning and gets a hash, so that two never collide.
*/}}

{{- define "paceline.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | replace "." "-" -}}
{{- end }}

{{/* paceline.name (list $ "target-default") */}}
{{- define "paceline.name" -}}
{{- $root := index . 0 -}}
{{- $name := printf "%s-%s" (include "paceline.fullname" $root) (index . 1) -}}
{{- if gt (len $name) 46 -}}
{{- printf "%s-%s" (trunc 37 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end }}

{{/* paceline.component "target" "default" is target-default, and orchestrator has no pool. */}}
{{- define "paceline.component" -}}
{{- list .role .pool | compact | join "-" -}}
{{- end }}

{{/* What a selector has: it can never change. paceline.selector (dict "root" $ "role" "target" "pool" "default") */}}
{{- define "paceline.selector" -}}
app.kubernetes.io/name: {{ .app | default "paceline" }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
paceline/pool: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "paceline.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: paceline
{{ include "paceline.selector" . }}
{{- end }}

{{/*
metadata of an object: paceline.metadata (dict "root" $ "role" … "pool" … "suffix" … "labels" …).
Its own labels win, so that no key is there twice.
*/}}
{{- define "paceline.metadata" -}}
name: {{ include "paceline.name" (list .root (.suffix | default (include "paceline.component" .))) }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- merge (dict) (.labels | default dict) (include "paceline.labels" . | fromYaml) | toYaml | nindent 2 }}
{{- end }}

{{/* paceline.image (dict "root" $ "image" $config.image) */}}
{{- define "paceline.image" -}}
{{- $registry := .root.Values.global.imageRegistry | default .image.registry -}}
{{- $repository := list $registry .image.repository | compact | join "/" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end }}

{{/*
A volume with one entry of a secret, and nothing else of it:
paceline.secretFile (dict "volume" "keys" "secret" NAME "entry" "keys")
*/}}
{{- define "paceline.secretFile" -}}
name: {{ .volume }}
secret:
  secretName: {{ .secret | quote }}
  items:
    - {key: {{ .entry }}, path: {{ .entry }}}
{{- end }}

{{/* The pod of `helm test`: no server, so no server's selector may fit it. */}}
{{- define "paceline.testSelector" -}}
app.kubernetes.io/name: paceline-test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}
