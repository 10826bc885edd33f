package paceline

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func wantViolation(t *testing.T, err error, field string) {
	t.Helper()
	var failure *Error
	if !errors.As(err, &failure) || failure.Kind != ErrInvalidField {
		t.Fatalf("the error is %v, not about %s", err, field)
	}
	if len(failure.Violations) != 1 || failure.Violations[0].Field != field {
		t.Fatalf("the violations are %+v, not of %s", failure.Violations, field)
	}
}

func TestPlaintextToAnotherMachineIsRefused(t *testing.T) {
	for _, address := range []string{"10.0.0.1:50050", "example.com:443", "dns:///example.com:443", "[2001:db8::1]:1"} {
		_, err := Dial(address)
		wantViolation(t, err, "address")
		client, err := Dial(address, WithInsecure())
		if err != nil {
			t.Fatalf("%s: %v", address, err)
		}
		client.Close()
	}
}

func TestPlaintextOnThisMachineIsAllowed(t *testing.T) {
	addresses := []string{
		"127.0.0.1:50050", "127.8.8.8:1", "localhost:50050", "[::1]:50050",
		"dns:///localhost:50050", "dns:localhost:50050", "passthrough:///127.0.0.1:1", "unix:/tmp/socket",
	}
	for _, address := range addresses {
		client, err := Dial(address)
		if err != nil {
			t.Fatalf("%s: %v", address, err)
		}
		client.Close()
	}
}

func TestAMalformedAddressIsRefused(t *testing.T) {
	for _, address := range []string{"", "localhost", ":50050", "localhost:", "localhost:http", "localhost:65536", "::1:50050", "dns:///localhost"} {
		_, err := Dial(address, WithInsecure())
		wantViolation(t, err, "address")
	}
}

func TestATLSFileThatIsOfNoUseIsNamed(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(t.TempDir(), "missing.pem")
	for field, files := range map[string]TLS{
		"tls":                  {CertificateFile: empty},
		"tls.ca_file":          {CAFile: missing},
		"tls.certificate_file": {CertificateFile: empty, KeyFile: empty},
		"tls.key_file":         {CertificateFile: empty, KeyFile: missing},
	} {
		_, err := Dial("example.com:443", WithTLS(files))
		wantViolation(t, err, field)
	}
	_, err := Dial("example.com:443", WithTLS(TLS{CAFile: empty}))
	wantViolation(t, err, "tls.ca_file")
}
