{{/*
What is not said is the chart's default. Helm takes a value that is null out of the values, the
chart's own default included, and with `--reuse-values` the values of an older chart lack what is
new: a template would print either as 0 or as nothing. So each template begins with this, since no
order of rendering is promised, and reads .Values only then. files/defaults.json is values.yaml as
`make chart` writes it, since Helm shows that file to no template.
*/}}
{{- define "paceline.settle" -}}
{{- if not (hasKey . "Settled") -}}
{{- include "paceline.fill" (list .Values (.Files.Get "files/defaults.json" | fromJson)) -}}
{{- $_ := set . "Settled" true -}}
{{- end -}}
{{- end }}

{{/*
Put what is missing into a map, in place: paceline.fill (list $map $defaults). Requests, limits and
labels have keys of the operator's own: there null takes out one, or all of them.
*/}}
{{- define "paceline.fill" -}}
{{- $said := first . -}}
{{- range $key, $default := last . -}}
{{- $value := index $said $key -}}
{{- $isOpen := has $key (list "requests" "limits" "labels") -}}
{{- if and (kindIs "map" $value) (kindIs "map" $default) (not $isOpen) -}}
{{- include "paceline.fill" (list $value $default) -}}
{{- else if and (kindIs "invalid" $value) (not (kindIs "invalid" $default)) -}}
{{- $_ := set $said $key (ternary dict $default $isOpen) -}}
{{- end -}}
{{- end -}}
{{- end }}
