package paceline

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
)

const (
	// DefaultTimeout is the deadline of a call whose context has none.
	DefaultTimeout = 120 * time.Second

	maxReceiveBytes = 64 << 20 // room for the timeline of a long request
	connectTimeout  = 10 * time.Second
)

// TLS has the certificates of TLS and mTLS: PEM, in files or as bytes.
type TLS struct {
	// CAFile has the trusted certificate authorities. Default: the system's.
	CAFile string
	// CertificateFile is the client's own certificate, for mTLS.
	CertificateFile string
	// KeyFile is its private key.
	KeyFile string
	// ServerName is the name in the server's certificate, if it differs from the address.
	ServerName string
	// CA is the content of a CAFile.
	CA []byte
	// Certificate is the content of a CertificateFile.
	Certificate []byte
	// Key is the content of a KeyFile.
	Key []byte
}

// A DialOption changes one thing about a connection.
type DialOption func(*dialOptions)

type dialOptions struct {
	tls      *TLS
	insecure bool
	timeout  time.Duration
	metadata func(context.Context) map[string]string
	token    func(context.Context) (string, error)
	grpc     []grpc.DialOption
}

// WithGRPC gives grpc-go's own options for channels, such as interceptors or OpenTelemetry's stats
// handler; they come after this client's.
func WithGRPC(options ...grpc.DialOption) DialOption {
	return func(o *dialOptions) { o.grpc = append(o.grpc, options...) }
}

// WithTLS encrypts the connection. Without it the connection is plaintext.
func WithTLS(files TLS) DialOption { return func(o *dialOptions) { o.tls = &files } }

// WithInsecure allows plaintext to another machine.
func WithInsecure() DialOption { return func(o *dialOptions) { o.insecure = true } }

// WithTimeout sets the deadline of a call whose context has none; more than a week is a week. Default
// DefaultTimeout.
func WithTimeout(timeout time.Duration) DialOption {
	return func(o *dialOptions) { o.timeout = timeout }
}

// routeTo checks everything that can be checked without connecting, and returns a route for channels.
// They connect in the background.
func routeTo(address string, to target, options dialOptions) (func() (*grpc.ClientConn, error), error) {
	security, err := transportSecurity(address, to.local, options)
	if err != nil {
		return nil, err
	}
	all := append(channelOptions(), security)
	if !to.leadsToOne {
		all = append(all, spread())
	}
	if strings.HasPrefix(to.name, "dns:") && !to.leadsToOne {
		all = append(all, nameOf(strings.TrimPrefix(to.name, "dns:")).lookUps())
	}
	all = append(all, options.grpc...)
	return func() (*grpc.ClientConn, error) {
		// Dial and not NewClient, which grpc-go has since 1.63: see README.md.
		channel, err := grpc.Dial(to.name, all...)
		if err != nil {
			return nil, invalidField("address", err.Error())
		}
		return channel, nil
	}, nil
}

// channelOptions make a dead peer noticed in about 25 s, and a server that comes back found within half
// a second; one that accepts a connection and says nothing is given up after connectTimeout. No retries
// but ours: they would hide errors.
func channelOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 5 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReceiveBytes)),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
	}
}

func transportSecurity(address string, local bool, options dialOptions) (grpc.DialOption, error) {
	if options.tls != nil {
		config, err := tlsConfig(*options.tls)
		if err != nil {
			return nil, err
		}
		return grpc.WithTransportCredentials(credentials.NewTLS(config)), nil
	}
	if !local && !options.insecure {
		return nil, invalidField("address", address+" is not on this machine and there is no TLS: "+
			"give TLS options, or allow plaintext with the option insecure")
	}
	// The package credentials/insecure is newer than grpc-go 1.33: see README.md.
	return grpc.WithInsecure(), nil
}

func tlsConfig(files TLS) (*tls.Config, error) {
	config := &tls.Config{ServerName: files.ServerName, MinVersion: tls.VersionTLS12}
	hasCertificate := files.CertificateFile != "" || files.Certificate != nil
	if hasCertificate != (files.KeyFile != "" || files.Key != nil) {
		return nil, invalidField("tls", "a certificate and its key belong together")
	}
	authorities, err := contentOf("ca", files.CAFile, files.CA)
	if err != nil {
		return nil, err
	}
	if authorities != nil {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(authorities) {
			field, what := fieldOf("ca", files.CAFile)
			return nil, invalidField(field, what+"has no certificate")
		}
	}
	if hasCertificate {
		own, err := readKeyPair(files)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{own}
	}
	return config, nil
}

func readKeyPair(files TLS) (tls.Certificate, error) {
	certificate, err := contentOf("certificate", files.CertificateFile, files.Certificate)
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := contentOf("key", files.KeyFile, files.Key)
	if err != nil {
		return tls.Certificate{}, err
	}
	own, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		field, _ := fieldOf("certificate", files.CertificateFile)
		return tls.Certificate{}, invalidField(field, err.Error())
	}
	return own, nil
}

// contentOf returns the content of a file, or the given content; nil without both.
func contentOf(name, path string, content []byte) ([]byte, error) {
	if path == "" {
		return content, nil
	}
	if content != nil {
		return nil, invalidField("tls."+name, "and its file are both given: give one")
	}
	return readFile("tls."+name+"_file", path)
}

func fieldOf(name, path string) (field, what string) {
	if path == "" {
		return "tls." + name, ""
	}
	return "tls." + name + "_file", path + ": "
}

func readFile(field, path string) ([]byte, error) {
	content, err := os.ReadFile(path)
	var why *fs.PathError
	if errors.As(err, &why) {
		return nil, invalidField(field, fmt.Sprintf("%s: %v", path, why.Err))
	}
	return content, nil
}

// A target is the destination of an address.
type target struct {
	name       string // gRPC's
	local      bool   // on this machine
	leadsToOne bool   // to one server; a name can lead to several
}

func parseAddress(address string) (target, error) {
	scheme, rest, found := strings.Cut(address, ":")
	switch {
	case found && scheme == "unix":
		return target{name: address, local: true, leadsToOne: true}, nil
	case found && (scheme == "dns" || scheme == "passthrough"):
		to, err := targetOf(rest[strings.LastIndex(rest, "/")+1:])
		to.name = address
		if !strings.HasPrefix(rest, "//") {
			to.name = scheme + ":///" + rest
		}
		return to, err
	}
	to, err := targetOf(address)
	if !to.leadsToOne {
		to.name = "dns:///" + address // which grpc.Dial would else pass through, and dial one of them
	}
	return to, err
}

func targetOf(endpoint string) (target, error) {
	host, err := hostOf(endpoint)
	isOne := host == "localhost" || net.ParseIP(host) != nil
	return target{name: endpoint, local: isLoopback(host), leadsToOne: isOne}, err
}

func hostOf(endpoint string) (string, error) {
	host, port, err := net.SplitHostPort(endpoint)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil || host == "" {
		return "", invalidField("address", fmt.Sprintf("%q must be HOST:PORT", endpoint))
	}
	return host, nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host) // nil for a name: its addresses are not known here
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
