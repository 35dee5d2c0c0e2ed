//! HTTP/1 requests: the host that the first request of a stream is for.
//!
//! Servers are lenient in different ways. So a request is read only in the strict form of RFC 9112, and whatever else some
//! server regards as a request is malformed:
//!
//! | first line | read as |
//! |---|---|
//! | `METHOD TARGET VERSION` | request; its header is read |
//! | names a version in any other form, or is a request of HTTP/0.9 or a PROXY header | malformed |
//! | complete, and none of these | another protocol |
//! | may become a request line | incomplete |
//! | cannot become one, and has no end yet | another protocol; [`FirstLine`] reads on |

use core::mem::MaybeUninit;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::borrow::Cow;

use crate::first::FIRST_BYTES_MAX;
use crate::name::HostName;
use crate::tls::Read;

/// Maximum length of a request's header in bytes.
pub const REQUEST_MAX: usize = FIRST_BYTES_MAX;
/// Maximum number of header fields.
const FIELDS_MAX: usize = 128;
/// Maximum length of a method in bytes.
const METHOD_MAX: usize = 32;

/// Server that an HTTP request names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    Name(HostName),
    Address(IpAddr),
    /// The request names no host.
    Absent,
}

/// Signature of the PROXY protocol, version 2.
const PROXY_V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
/// Protocols that servers of HTTP accept in a request line.
const VERSIONS: [&[u8]; 5] = [b"HTTP/1.1", b"HTTP/1.0", b"RTSP/1.0", b"RTSP/2.0", b"ICE/1.0"];
/// Number of bytes of a line that [`FirstLine`] keeps.
const LINE_START: usize = 64;
/// Maximum number of bytes without a complete line that [`FirstLine`] reads. Servers that accept a malformed request line
/// read at most 64 KiB.
pub const LINE_MAX: usize = 128 << 10;

/// Reads the first request of a stream. Returns `None` if its first bytes are no strict request. Then the rest of the first
/// line must be read by [`FirstLine`].
pub fn read_stream(bytes: &[u8]) -> Option<Read<Host>> {
    if PROXY_V2.starts_with(bytes) {
        return Some(Read::Incomplete);
    }
    if bytes.starts_with(PROXY_V2) {
        return Some(Read::Malformed);
    }
    // Servers ignore empty lines before a request (RFC 9112, 2.2).
    let start = bytes.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(bytes.len());
    let text = &bytes[start..];
    match (FirstLine::default().read(bytes), line_form(text)) {
        (Line::Request, LineForm::Strict(version)) => Some(read_request(text, version)),
        (Line::Request, LineForm::Broken) => Some(Read::Malformed),
        (Line::Other, _) | (Line::Open, LineForm::Broken) => None,
        _ if bytes.len() >= REQUEST_MAX => Some(Read::Malformed),
        _ => Some(Read::Incomplete),
    }
}

/// Returns `true` if the bytes are a word or empty lines: the beginning of a request line, or the first message of another
/// protocol.
pub fn is_word(bytes: &[u8]) -> bool {
    let start = bytes.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(bytes.len());
    bytes[start..].iter().all(|byte| is_token(*byte))
}

/// Results of reading a first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// The line is not complete.
    Open,
    Other,
    /// Some server regards the line as a request.
    Request,
}

/// Reader of the first line of a stream, lenient as servers are: finds each line that some server regards as a request.
///
/// Lines of blanks and control characters do not count. A request names a version, or is one of HTTP/0.9.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirstLine {
    /// First bytes of the line, without blanks before them.
    start: Vec<u8>,
    /// Last bytes of the line, in capitals.
    last: [u8; 6],
    words: usize,
    in_word: bool,
    read: usize,
}

impl FirstLine {
    /// Reads more bytes of the stream, up to the end of the line.
    pub fn read(&mut self, bytes: &[u8]) -> Line {
        for byte in bytes {
            self.read += 1;
            if *byte == b'\n' && self.words > 0 {
                let is_request = self.is_request_without_version();
                return if is_request { Line::Request } else { Line::Other };
            }
            self.last.rotate_left(1);
            self.last[5] = byte.to_ascii_uppercase();
            if is_blank(*byte) {
                self.in_word = false;
                self.last[5] = b' ';
            } else {
                self.words += usize::from(!self.in_word);
                self.in_word = true;
            }
            if self.words > 0 && self.start.len() < LINE_START {
                self.start.push(if is_blank(*byte) { b' ' } else { *byte });
            }
            let ends = [&b"HTTP/"[..], b" RTSP/", b" ICE/"];
            if ends.iter().any(|end| self.last.ends_with(end)) {
                return Line::Request;
            }
        }
        if self.read < LINE_MAX { Line::Open } else { Line::Other }
    }

    /// Returns `true` for a header of the PROXY protocol, which hides the next line, and for a request of HTTP/0.9.
    /// Servers read header fields behind such a request.
    fn is_request_without_version(&self) -> bool {
        let mut words = self.start.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let is_method = first.iter().all(|byte| is_token(*byte) && !byte.is_ascii_lowercase());
        let is_target = matches!(second.first(), Some(b'/' | b'*'))
            || second.windows(3).any(|part| part == b"://");
        first == b"PROXY" || self.words == 2 && (first == b"GET" || is_method && is_target)
    }
}

/// Returns `true` for characters that some server removes from the beginning of a line, or regards as the end of a word.
fn is_blank(byte: u8) -> bool {
    byte <= b' ' || matches!(byte, 0x85 | 0xa0)
}

/// Forms of the line at the beginning of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineForm {
    /// Complete request line (RFC 9112, 3) with this version.
    Strict(&'static [u8]),
    /// Beginning of a request line.
    Prefix,
    Broken,
}

fn line_form(text: &[u8]) -> LineForm {
    let end = text.iter().position(|byte| *byte == b'\n');
    let line = &text[..end.unwrap_or(text.len())];
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let open = if end.is_none() { LineForm::Prefix } else { LineForm::Broken };
    let mut parts = line.splitn(3, |byte| *byte == b' ');
    let (method, target, version) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
    if method.len() > METHOD_MAX || !method.iter().all(|byte| is_token(*byte)) {
        return LineForm::Broken;
    }
    let Some(target) = target else { return open };
    if method.is_empty() || !target.iter().all(u8::is_ascii_graphic) {
        return LineForm::Broken;
    }
    let Some(version) = version else { return open };
    if target.is_empty() {
        return LineForm::Broken;
    }
    match VERSIONS.into_iter().find(|known| known.starts_with(version)) {
        Some(known) if end.is_some() && known == version => LineForm::Strict(known),
        Some(_) => open,
        None => LineForm::Broken,
    }
}

/// Reads a request whose line is strict.
fn read_request(text: &[u8], version: &[u8]) -> Read<Host> {
    let mut text = Cow::Borrowed(text);
    if !version.starts_with(b"HTTP/") {
        // RTSP and ICE have the same form, and servers of HTTP accept them.
        let line = text.iter().position(|byte| *byte == b'\n').unwrap_or(0);
        let version_start = text[..line].iter().rposition(|byte| *byte == b' ').unwrap_or(0) + 1;
        let behind = text[version_start + version.len()..].to_vec();
        text = [&text[..version_start], b"HTTP/1.0", &behind].concat().into();
    }
    let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut []);
    match request.parse_with_uninit_headers(&text, &mut fields) {
        Ok(httparse::Status::Complete(len))
            if len <= REQUEST_MAX && has_whole_lines(&text[..len]) =>
        {
            host(&request).map_or(Read::Malformed, Read::Complete)
        }
        Ok(httparse::Status::Partial) if text.len() < REQUEST_MAX => Read::Incomplete,
        Ok(_) | Err(_) => Read::Malformed,
    }
}

/// Returns `true` if each CR is followed by LF. Some servers regard CR alone as the end of a line.
fn has_whole_lines(header: &[u8]) -> bool {
    header.windows(2).all(|pair| pair[0] != b'\r' || pair[1] == b'\n')
}

/// Returns `true` for characters of a method (RFC 9110, 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Returns the host of a request. `None` if it names several, or one that cannot be read.
fn host(request: &httparse::Request<'_, '_>) -> Option<Host> {
    let mut hosts = request.headers.iter().filter(|field| field.name.eq_ignore_ascii_case("host"));
    let field = match (hosts.next(), hosts.next()) {
        (None, _) => Host::Absent,
        (Some(field), None) => parse_host(core::str::from_utf8(field.value).ok()?)?,
        (Some(_), Some(_)) => return None,
    };
    match request_authority(request)? {
        None => Some(field),
        Some(target) => (field == Host::Absent || field == target).then_some(target),
    }
}

/// Returns the host in the target of a request through a proxy (RFC 9112, 3.2). `Some(None)` if the target has none, `None`
/// if it is malformed.
fn request_authority(request: &httparse::Request<'_, '_>) -> Option<Option<Host>> {
    let target = request.path?;
    if request.method == Some("CONNECT") {
        return parse_named_host(target).map(Some);
    }
    if target.starts_with('/') || target == "*" {
        return Some(None);
    }
    let (scheme, rest) = target.split_once("://")?;
    let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    if !scheme.bytes().all(is_scheme) {
        return None;
    }
    parse_named_host(rest.split(['/', '?', '#']).next()?).map(Some)
}

fn parse_named_host(text: &str) -> Option<Host> {
    parse_host(text).filter(|host| *host != Host::Absent)
}

/// Parses a host with an optional port: `HOST[:PORT]`. Anything else is malformed: servers differ in which part is the
/// host.
fn parse_host(text: &str) -> Option<Host> {
    let text = text.trim_matches([' ', '\t']);
    if text.is_empty() {
        return Some(Host::Absent);
    }
    let is_port = |rest: &str| {
        rest.is_empty()
            || rest.strip_prefix(':').is_some_and(|port| {
                port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit())
            })
    };
    if let Some(rest) = text.strip_prefix('[') {
        let (ip, port) = rest.split_once(']')?;
        let ip = ip.parse::<Ipv6Addr>().ok().filter(|_| is_port(port))?;
        return Some(Host::Address(ip.into()));
    }
    let (host, port) = text.split_at(text.find(':').unwrap_or(text.len()));
    if !is_port(port) {
        return None;
    }
    match host.parse::<Ipv4Addr>() {
        Ok(ip) => Some(Host::Address(ip.into())),
        Err(_) => HostName::parse(host).ok().map(Host::Name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Option<Read<Host>> {
        Some(Read::Complete(Host::Name(HostName::parse(text).unwrap())))
    }

    fn read(text: &str) -> Option<Read<Host>> {
        read_stream(text.as_bytes())
    }

    #[test]
    fn request_in_any_segments_shows_its_host() {
        let text = "\r\nGET /x HTTP/1.1\r\nUser-Agent: x\r\nhOsT:\tA.org:8080 \r\n\r\nbody";
        let end = text.find("body").unwrap();
        for at in 0..end {
            assert_eq!(read(&text[..at]), Some(Read::Incomplete), "{at}");
        }
        assert_eq!(read(&text[..end]), name("a.org"));
        assert_eq!(read(text), name("a.org"));
        assert_eq!(read("GET / HTTP/1.0\r\n\r\n"), Some(Read::Complete(Host::Absent)));
        let address = Host::Address("2001:db8::1".parse().unwrap());
        let request = "GET / HTTP/1.1\r\nHost: [2001:db8::1]:80\r\n\r\n";
        assert_eq!(read(request), Some(Read::Complete(address)));
    }

    #[test]
    fn target_of_a_proxy_request_counts_as_host() {
        assert_eq!(read("CONNECT b.org:443 HTTP/1.1\r\n\r\n"), name("b.org"));
        assert_eq!(read("GET http://b.org:80/x HTTP/1.1\r\n\r\n"), name("b.org"));
        assert_eq!(read("DESCRIBE rtsp://b.org/x RTSP/1.0\r\n\r\n"), name("b.org"));
        let differs = "GET http://b.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n";
        assert_eq!(read(differs), Some(Read::Malformed));
    }

    #[test]
    fn ambiguous_request_is_malformed() {
        for text in [
            "GET / HTTP/1.1\r\nHost: a.org\r\nHost: b.org\r\n\r\n",
            "GET / HTTP/1.1\r\nHost : a.org\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.org b.org\r\n\r\n",
            "GET / HTTP/1.1\r\n Host: a.org\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "get\t/ http/1.1\r\nHost: a.org\r\n\r\n",
        ] {
            assert_eq!(read(text), Some(Read::Malformed), "{text:?}");
        }
        let long = format!("GET /{}", "x".repeat(REQUEST_MAX));
        assert_eq!(read(&long), Some(Read::Malformed));
        let long = format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(REQUEST_MAX));
        assert_eq!(read(&long), Some(Read::Malformed));
    }

    /// Requests that some server answers for the host `b.org`. Servers: Python 3.11 `wsgiref`, Node 20, Go 1.26.
    const LENIENT: [&str; 31] = [
        " GET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "\tGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "\0GET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "\x01GET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "\x0bGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "\x1cGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "\u{feff}GET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        " \r\nGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "\r\n GET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "GET\t/\tHTTP/1.1\r\nHost: b.org\r\n\r\n",
        "GET  /  HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "GET / HTTP/1.1 \r\nHost: b.org\r\n\r\n",
        "GET / HTTP/1.2\r\nHost: b.org\r\n\r\n",
        "GET / HTTP/1.10\r\nHost: b.org\r\n\r\n",
        "GET / HTTP/01.1\r\nHost: b.org\r\n\r\n",
        "GET / HTTP/2.0\r\nHost: b.org\r\n\r\n",
        "GET /\0 HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "GET /\u{e9} HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "GET /\r\nHost: b.org\r\n\r\n",
        "GET x\r\nHost: b.org\r\n\r\n",
        " GET /\r\nHost: b.org\r\n\r\n",
        "POST /\r\nHost: b.org\r\n\r\n",
        "GET  http://b.org/\r\n\r\n",
        "PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\nGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "\r\n\r\n\0\r\nQUIT\n!\x11\0\x0cGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "GET / HTTP/1.1\r\nX: a\rHost: b.org\r\n\r\n",
        "GET x HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "GET http:x HTTP/1.1\r\nHost: b.org\r\n\r\n",
        "DESCRIBE / RTSP/1.0\r\nHost: a.org\r\nHost: b.org\r\n\r\n",
        "SOURCE / ICE/1.00\r\nHost: b.org\r\n\r\n",
    ];

    #[test]
    fn lenient_request_is_malformed_in_any_segments() {
        for text in LENIENT {
            let bytes = text.as_bytes();
            assert_eq!(read_stream(bytes), Some(Read::Malformed), "{text:?}");
            for at in 1..bytes.len() {
                match read_stream(&bytes[..at]) {
                    Some(Read::Incomplete | Read::Malformed) => {}
                    Some(read) => panic!("{text:?} at {at}: {read:?}"),
                    None => {
                        let mut line = FirstLine::default();
                        assert_eq!(line.read(&bytes[..at]), Line::Open, "{text:?} at {at}");
                        assert_eq!(line.read(&bytes[at..]), Line::Request, "{text:?} at {at}");
                    }
                }
            }
        }
    }

    #[test]
    fn ambiguous_authority_is_malformed() {
        for host in [
            "a.org@b.org",
            "a.org:80@b.org",
            "a.org:x",
            "a.org\\b.org",
            "[::1]b.org",
            "a.org,b.org",
        ] {
            let field = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
            assert_eq!(read(&field), Some(Read::Malformed), "{host}");
            for start in ["GET http://", "GET a+b://", "CONNECT "] {
                let target = format!("{start}{host} HTTP/1.1\r\nHost: a.org\r\n\r\n");
                assert_eq!(read(&target), Some(Read::Malformed), "{target}");
            }
        }
        let other = "GET a+b://b.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n";
        assert_eq!(read(other), Some(Read::Malformed));
    }

    #[test]
    fn header_has_the_same_limit_in_one_segment_and_in_several() {
        let header = |len: usize| {
            let start = "GET / HTTP/1.1\r\nHost: a.org\r\nX: ";
            format!("{start}{}\r\n\r\n", "x".repeat(len - start.len() - 4))
        };
        assert_eq!(read(&header(REQUEST_MAX)), name("a.org"));
        assert_eq!(read(&header(REQUEST_MAX)[..20_000]), Some(Read::Incomplete));
        assert_eq!(read(&header(REQUEST_MAX + 1)), Some(Read::Malformed));
        assert_eq!(read(&header(REQUEST_MAX + 1)[..REQUEST_MAX]), Some(Read::Malformed));
    }

    #[test]
    fn other_protocols_are_not_http() {
        for text in ["SSH-2.0-x\r\n", "EHLO x\r\n", "*1\r\n$4\r\n", "AMQP\0", "\x16\x03\x01"] {
            assert_eq!(read(text), None, "{text:?}");
        }
        for text in [
            "get /key\r\n",
            "SET x y\r\n",
            "QUIT\r\n",
            "/path\r\n",
            "a.org /path 0\r\n",
            "\0\0\0\x08\x04\x16/",
        ] {
            assert_eq!(read(text), None, "{text:?}");
        }
        assert_eq!(read(&"x".repeat(METHOD_MAX + 1)), None);
        assert_eq!(read("0033git-upload-pack /x\0host=a.org\0"), None);
        assert_eq!(read("0033git-upload-pack /x\0host=a.org\0\n"), None);
    }
}
