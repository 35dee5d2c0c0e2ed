//! Differential test: HTTP servers against [`ringfence_policy::first::inspect`].
//!
//! Each request is sent to a server that answers with the host that it has read. If that is the denied host, the policy must
//! have read the same one, or have refused the request.
//!
//! Servers that are not installed are left out with the line `SKIPPED: reason`. With `RINGFENCE_TEST_REQUIRE=1` that
//! is a failure.

#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ringfence_policy::first::{Shown, inspect};
use ringfence_policy::http::{FirstLine, Host, Line};

const DENIED: &str = "b.org";
const PYTHON: &str = r#"
from wsgiref.simple_server import make_server, WSGIRequestHandler
class Quiet(WSGIRequestHandler):
    def log_message(self, *rest): pass
def answer(environ, start):
    start('200 OK', [])
    return [('SEEN %s\n' % environ.get('HTTP_HOST')).encode('latin-1', 'replace')]
server = make_server('127.0.0.1', 0, answer, handler_class=Quiet)
print(server.server_port, flush=True)
server.serve_forever()
"#;
const NODE: &str = r"
const server = require('http').createServer((request, answer) => answer.end('SEEN ' + request.headers.host + '\n'));
server.on('clientError', (error, socket) => socket.destroy());
server.listen(0, '127.0.0.1', () => console.log(server.address().port));
";
const GO: &str = r#"
package main
import ("fmt"; "net"; "net/http")
func main() {
	listener, _ := net.Listen("tcp", "127.0.0.1:0")
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "SEEN %s\n", r.Host) }))
}
"#;

/// Server that runs until it is dropped.
struct Server {
    name: &'static str,
    child: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(name: &'static str, command: &mut Command) -> Option<Server> {
    let started = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = match started {
        Ok(child) => child,
        Err(error) => {
            skip(name, &error.to_string());
            return None;
        }
    };
    let mut line = String::new();
    BufReader::new(child.stdout.take()?).read_line(&mut line).ok()?;
    match line.trim().parse() {
        Ok(port) => Some(Server { name, child, port }),
        Err(_) => {
            let _ = child.kill();
            let _ = child.wait();
            skip(name, "it does not start");
            None
        }
    }
}

fn skip(name: &str, reason: &str) {
    let required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
    assert!(!required, "RINGFENCE_TEST_REQUIRE is set, and {name}: {reason}");
    println!("SKIPPED: {name}: {reason}");
}

fn servers(directory: &std::path::Path) -> Vec<Server> {
    let source = directory.join("server.go");
    let program = directory.join("server");
    std::fs::write(&source, GO).unwrap();
    let built = Command::new("go").arg("build").arg("-o").arg(&program).arg(&source).status();
    if !built.is_ok_and(|status| status.success()) {
        println!("the server in Go is not built");
    }
    [
        start("Python", Command::new("python3").args(["-c", PYTHON])),
        start("Node", Command::new("node").args(["-e", NODE])),
        start("Go", &mut Command::new(&program)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Sends a request. Returns the host that the server has read.
fn host_of(server: &Server, request: &[u8]) -> Option<String> {
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    // The server may close the connection at any byte.
    let _ = socket.write_all(request);
    let _ = socket.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    let text = String::from_utf8_lossy(&answer);
    let (_, rest) = text.split_once("SEEN ")?;
    rest.lines().next().map(str::to_owned)
}

/// Returns `true` if the policy refuses the request or reads the denied host.
fn is_stopped(request: &[u8]) -> bool {
    match inspect(request, true) {
        Some(Shown::Malformed) => true,
        Some(Shown::Http(Host::Name(name))) => name.as_str() == DENIED,
        Some(Shown::Unknown) => FirstLine::default().read(request) == Line::Request,
        _ => false,
    }
}

fn requests() -> Vec<Vec<u8>> {
    let mut prefixes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    prefixes.extend(
        [&b""[..], b" \r\n", b"\r\n ", b"\n\r", b"\r\n\r\n", b"\xef\xbb\xbf", b"x\r\n"]
            .map(Vec::from),
    );
    let long = "A".repeat(33);
    let lines = [
        "GET / HTTP/1.1",
        "get / HTTP/1.1",
        "GET\t/\tHTTP/1.1",
        "GET  /  HTTP/1.1",
        "GET / HTTP/1.1 ",
        "GET / HTTP/1.0",
        "GET / HTTP/1.2",
        "GET / HTTP/0.9",
        "GET / HTTP/2.0",
        "GET / HTTP/01.1",
        "GET / http/1.1",
        "GET / HTTP/1.1x",
        "GET /",
        "GET x",
        "POST /",
        "GET / RTSP/1.0",
        "DESCRIBE / RTSP/1.0",
        "SOURCE / ICE/1.0",
        "GET /\0 HTTP/1.1",
        "GET /\u{e9} HTTP/1.1",
        "GET x HTTP/1.1",
        "GET http:x HTTP/1.1",
        "GET http://a.org/ HTTP/1.1",
        "GET http://a.org@b.org/ HTTP/1.1",
        "GET http://b.org\\@a.org/ HTTP/1.1",
        "GET a+b://b.org/ HTTP/1.1",
        "GET http://b.org:x/ HTTP/1.1",
        "GET //b.org/ HTTP/1.1",
        "CONNECT b.org:80 HTTP/1.1",
        "GET * HTTP/1.1",
        &long,
    ];
    let fields = [
        "Host: b.org",
        "X: a\rHost: b.org",
        "X: a\n\rHost: b.org",
        ": x\r\nHost: b.org",
        "host:b.org",
        "Host\t: b.org",
        " Host: b.org",
        "Host: a.org",
    ];
    let mut requests = Vec::new();
    for prefix in &prefixes {
        requests.push(
            [prefix, &b"GET / HTTP/1.1\r\nHost: b.org\r\nConnection: close\r\n\r\n"[..]].concat(),
        );
        requests.push([prefix, &b"GET /\r\nHost: b.org\r\n\r\n"[..]].concat());
    }
    for line in lines {
        for field in fields {
            for end in ["\r\n", "\n"] {
                requests
                    .push([line, end, field, end, "Connection: close", end, end].concat().into());
            }
        }
    }
    for byte in 0..=255_u8 {
        requests.push(
            [&b"GET"[..], &[byte], b"/ HTTP/1.1\r\nHost: b.org\r\nConnection: close\r\n\r\n"]
                .concat(),
        );
        requests.push(
            [&b"GET /"[..], &[byte], b"HTTP/1.1\r\nHost: b.org\r\nConnection: close\r\n\r\n"]
                .concat(),
        );
        requests.push(
            [&b"GET / HTTP/1.1\r\nX: y"[..], &[byte], b"Host: b.org\r\nConnection: close\r\n\r\n"]
                .concat(),
        );
        requests.push(
            [&b"GET / HTTP/1.1\r\n"[..], &[byte], b"Host: b.org\r\nConnection: close\r\n\r\n"]
                .concat(),
        );
    }
    requests
}

#[test]
#[ignore = "long: starts servers in Python, Node and Go, and sends each some 2000 requests"]
fn request_that_a_server_reads_for_a_denied_host_is_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let requests = requests();
    for server in servers(directory.path()) {
        let mut seen = 0;
        for request in &requests {
            let Some(host) = host_of(&server, request) else { continue };
            if host.contains(DENIED) {
                seen += 1;
                let text = String::from_utf8_lossy(request);
                assert!(is_stopped(request), "{} reads {host:?} in {text:?}", server.name);
            }
        }
        println!("{}: {seen} of {} requests are for the denied host", server.name, requests.len());
        assert!(seen > 10, "{}", server.name);
    }
}
