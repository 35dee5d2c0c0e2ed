//! HTTP/1 requests: the host that the first request of a stream is for.

use core::mem::MaybeUninit;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::name::HostName;
use crate::tls::Read;

/// Maximum length of a request's header in bytes.
pub const REQUEST_MAX: usize = 16 << 10;
/// Maximum number of header fields.
const FIELDS_MAX: usize = 128;
/// Maximum length of a method in bytes.
const METHOD_MAX: usize = 32;

/// Host in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    Name(HostName),
    Address(IpAddr),
    /// The request names no host.
    Absent,
}

/// Reads the first request of a stream. Returns `None` if the stream is not HTTP.
pub fn read_stream(bytes: &[u8]) -> Option<Read<Host>> {
    // Servers ignore empty lines before a request (RFC 9112, 2.2).
    let start = bytes.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(bytes.len());
    let text = &bytes[start..];
    let line_end = text.iter().position(|byte| *byte == b'\n');
    let line = &text[..line_end.unwrap_or(text.len())];
    let method_len = line.iter().take_while(|byte| is_token(**byte)).count();
    let is_method = match line.get(method_len) {
        Some(b' ' | b'\t') => (1..=METHOD_MAX).contains(&method_len),
        Some(_) => false,
        None => method_len <= METHOD_MAX && line_end.is_none(),
    };
    if !is_method {
        return None;
    }
    if line_end.is_none() {
        let is_long = bytes.len() > REQUEST_MAX;
        return Some(if is_long { Read::Malformed } else { Read::Incomplete });
    }
    let upper = line.to_ascii_uppercase();
    let names_http = upper.windows(5).any(|part| part == b"HTTP/");
    // A request of HTTP/0.9 has no version.
    if !names_http && !upper.starts_with(b"GET ") {
        return None;
    }
    Some(read_request(text, names_http))
}

fn read_request(text: &[u8], has_version: bool) -> Read<Host> {
    if !has_version {
        return Read::Complete(Host::Absent);
    }
    let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut []);
    match request.parse_with_uninit_headers(text, &mut fields) {
        Ok(httparse::Status::Complete(_)) => host(&request).map_or(Read::Malformed, Read::Complete),
        Ok(httparse::Status::Partial) if text.len() <= REQUEST_MAX => Read::Incomplete,
        Ok(httparse::Status::Partial) | Err(_) => Read::Malformed,
    }
}

/// Characters of a method (RFC 9110, 5.6.2).
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
    // A request through a proxy names the host in its target (RFC 9112, 3.2).
    let target = request.path?;
    let authority = match target.split_once("://") {
        _ if request.method == Some("CONNECT") => Some(target),
        Some((scheme, rest)) if scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()) => {
            let authority = rest.split(['/', '?', '#', '\\']).next()?;
            Some(authority.rsplit_once('@').map_or(authority, |(_, host)| host))
        }
        _ => None,
    };
    match authority.map(parse_host) {
        None => Some(field),
        Some(target) => {
            let target = target?;
            (field == Host::Absent || field == target).then_some(target)
        }
    }
}

/// Parses a host with an optional port: `HOST[:PORT]`.
fn parse_host(text: &str) -> Option<Host> {
    let text = text.trim_matches([' ', '\t']);
    if text.is_empty() {
        return Some(Host::Absent);
    }
    if let Some(rest) = text.strip_prefix('[') {
        let ip = rest.split_once(']')?.0.parse::<Ipv6Addr>().ok()?;
        return Some(Host::Address(ip.into()));
    }
    let host = text.split_once(':').map_or(text, |(host, _)| host);
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
        assert_eq!(read("GET /\r\n"), Some(Read::Complete(Host::Absent)));
        let address = Host::Address("2001:db8::1".parse().unwrap());
        let request = "GET / HTTP/1.1\r\nHost: [2001:db8::1]:80\r\n\r\n";
        assert_eq!(read(request), Some(Read::Complete(address)));
    }

    #[test]
    fn target_of_a_proxy_request_counts_as_host() {
        assert_eq!(read("CONNECT b.org:443 HTTP/1.1\r\n\r\n"), name("b.org"));
        assert_eq!(read("GET http://u:p@b.org/x HTTP/1.1\r\n\r\n"), name("b.org"));
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

    #[test]
    fn other_protocols_are_not_http() {
        for text in ["SSH-2.0-x\r\n", "EHLO x\r\n", "*1\r\n$4\r\n", "AMQP\0", "\x16\x03\x01"] {
            assert_eq!(read(text), None, "{text:?}");
        }
        assert_eq!(read(&"x".repeat(METHOD_MAX + 1)), None);
        assert_eq!(read("0033git-upload-pack /x\0host=a.org\0\n"), None);
    }
}
