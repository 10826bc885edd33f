package paceline

import (
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

// TLS is how to trust the server, and how to be trusted by it (mTLS); the files are PEM.
type TLS struct {
	// CAFile is whom to trust. Default: the system's certificate authorities.
	CAFile string
	// CertificateFile is the client's own certificate, for mTLS.
	CertificateFile string
	// KeyFile is its private key.
	KeyFile string
	// ServerName is the name in the server's certificate, where it is not the address's.
	ServerName string
}

// A DialOption changes one thing about a connection.
type DialOption func(*dialOptions)

type dialOptions struct {
	tls      *TLS
	insecure bool
	timeout  time.Duration
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

// routeTo checks everything that can be checked without connecting, and returns what opens channels.
// They connect in the background.
func routeTo(address string, options dialOptions) (func() (*grpc.ClientConn, error), error) {
	target, local, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	security, err := transportSecurity(address, local, options)
	if err != nil {
		return nil, err
	}
	return func() (*grpc.ClientConn, error) {
		// Dial and not NewClient, which grpc-go has since 1.63: see README.md.
		channel, err := grpc.Dial(target, append(channelOptions(), security)...)
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
			"give TLS options, or say insecure to allow plaintext")
	}
	// The package credentials/insecure is newer than grpc-go 1.33: see README.md.
	return grpc.WithInsecure(), nil
}

func tlsConfig(files TLS) (*tls.Config, error) {
	config := &tls.Config{ServerName: files.ServerName, MinVersion: tls.VersionTLS12}
	if (files.CertificateFile == "") != (files.KeyFile == "") {
		return nil, invalidField("tls", "CertificateFile and KeyFile belong together")
	}
	if files.CAFile != "" {
		authorities, err := readFile("tls.ca_file", files.CAFile)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(authorities) {
			return nil, invalidField("tls.ca_file", files.CAFile+": has no certificate")
		}
	}
	if files.CertificateFile != "" {
		own, err := readKeyPair(files)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{own}
	}
	return config, nil
}

func readKeyPair(files TLS) (tls.Certificate, error) {
	certificate, err := readFile("tls.certificate_file", files.CertificateFile)
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := readFile("tls.key_file", files.KeyFile)
	if err != nil {
		return tls.Certificate{}, err
	}
	own, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return tls.Certificate{}, invalidField("tls.certificate_file", err.Error())
	}
	return own, nil
}

func readFile(field, path string) ([]byte, error) {
	content, err := os.ReadFile(path)
	var why *fs.PathError
	if errors.As(err, &why) {
		return nil, invalidField(field, fmt.Sprintf("%s: %v", path, why.Err))
	}
	return content, nil
}

// parseAddress returns gRPC's name for the address, and whether it is on this machine.
func parseAddress(address string) (target string, local bool, err error) {
	scheme, rest, found := strings.Cut(address, ":")
	switch {
	case found && scheme == "unix":
		return address, true, nil
	case found && (scheme == "dns" || scheme == "passthrough"):
		host, err := hostOf(rest[strings.LastIndex(rest, "/")+1:])
		if !strings.HasPrefix(rest, "//") {
			address = scheme + ":///" + rest
		}
		return address, isLoopback(host), err
	}
	host, err := hostOf(address)
	return address, isLoopback(host), err
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
	ip := net.ParseIP(host) // nil for a name: where it leads to is not ours to know
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
