{{/* Objects that every role has. Each takes a dict with root, role, pool and config. */}}

{{- define "paceline.podDisruptionBudget" -}}
{{- $budget := .config.podDisruptionBudget -}}
{{- if $budget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "paceline.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ include "paceline.count" $budget.maxUnavailable }}
  # A pod that does not serve protects nobody's work.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "paceline.allPods" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* Whose rights a pod has: paceline.serviceAccountName (dict "root" $ "role" … "config" …) */}}
{{- define "paceline.serviceAccountName" -}}
{{- .config.serviceAccountName | default (include "paceline.name" (list .root .role)) -}}
{{- end }}

{{- define "paceline.serviceAccount" -}}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "paceline.metadata" . | nindent 2 }}
  {{- with mustMergeOverwrite (deepCopy .root.Values.common.serviceAccountAnnotations) (deepCopy (.config.serviceAccountAnnotations | default dict)) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
