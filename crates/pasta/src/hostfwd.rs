//! Requests and replies of slirp4netns's API socket, by which a client adds and removes ports.
//!
//! A request is one JSON object: `{"execute": NAME, "arguments": {...}}`. The names are `add_hostfwd`,
//! `list_hostfwd` and `remove_hostfwd`. The reply is `{"return": {...}}` or `{"error": {"desc": TEXT}}`. The format
//! is that of slirp4netns's manual page.
//!
//! Clients are programs of the same user, but the values in a request often come from a container's
//! configuration. A request has at most [`REQUEST_MAX`] bytes, and the parser's depth is limited.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::io;

use serde::{Deserialize, Serialize};
use serde_json::ser::Formatter;

/// Maximum length of a request in bytes.
pub const REQUEST_MAX: usize = 4095;

/// Parsed request at the API socket of slirp4netns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostfwdRequest {
    Add(HostForward),
    List,
    Remove(u32),
}

/// Port that a client wants to be forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostForward {
    pub is_udp: bool,
    /// Address to listen at with IPv4.
    pub host_v4: Option<Ipv4Addr>,
    /// Address to listen at with IPv6.
    pub host_v6: Option<Ipv6Addr>,
    pub host_port: u16,
    /// Address of the namespace, if the request has one.
    pub guest: Option<IpAddr>,
    pub guest_port: u16,
}

/// Defects of a request at the API socket.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error("bad request: more than {REQUEST_MAX} bytes")]
    TooLong,
    #[error("bad request: {0}")]
    Malformed(#[from] serde_json::Error),
    #[error("bad request: unknown command `{0}`")]
    Command(String),
    #[error("bad request: {execute} needs `{argument}`")]
    Missing { execute: &'static str, argument: &'static str },
    #[error("bad request: proto `{0}` is none of tcp, tcp4, tcp6, udp, udp4, udp6")]
    Protocol(String),
    #[error("bad request: {name} `{text}` is not an address")]
    Address { name: &'static str, text: String },
    #[error("bad request: host_addr {host} has not the family of proto {proto}")]
    Family { host: IpAddr, proto: String },
    #[error("bad request: {0} is not a port: 1 to 65535")]
    Port(&'static str),
}

#[derive(Deserialize)]
struct Envelope {
    execute: String,
    #[serde(default)]
    arguments: Arguments,
}

#[derive(Default, Deserialize)]
struct Arguments {
    proto: Option<String>,
    host_addr: Option<String>,
    host_port: Option<u16>,
    guest_addr: Option<String>,
    guest_port: Option<u16>,
    id: Option<u32>,
}

impl HostfwdRequest {
    /// Parses the bytes that a client has sent.
    ///
    /// # Errors
    ///
    /// Returns the first rule that the request breaks.
    pub fn parse(bytes: &[u8]) -> Result<HostfwdRequest, RequestError> {
        if bytes.len() > REQUEST_MAX {
            return Err(RequestError::TooLong);
        }
        let Envelope { execute, arguments } = serde_json::from_slice(bytes)?;
        match execute.as_str() {
            "add_hostfwd" => arguments.forward().map(HostfwdRequest::Add),
            "list_hostfwd" => Ok(HostfwdRequest::List),
            "remove_hostfwd" => {
                let missing = RequestError::Missing { execute: "remove_hostfwd", argument: "id" };
                arguments.id.map(HostfwdRequest::Remove).ok_or(missing)
            }
            _ => Err(RequestError::Command(execute)),
        }
    }
}

impl Arguments {
    fn forward(self) -> Result<HostForward, RequestError> {
        let missing = |argument| RequestError::Missing { execute: "add_hostfwd", argument };
        let proto = self.proto.ok_or_else(|| missing("proto"))?;
        let (is_udp, with_v4, with_v6) = match proto.as_str() {
            "tcp" => (false, true, true),
            "tcp4" => (false, true, false),
            "tcp6" => (false, false, true),
            "udp" => (true, true, true),
            "udp4" => (true, true, false),
            "udp6" => (true, false, true),
            _ => return Err(RequestError::Protocol(proto)),
        };
        let host = address("host_addr", self.host_addr)?;
        let host = host.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        // An unspecified address stands for that of every family.
        let (v4, v6) = match host {
            ip if ip.is_unspecified() => (Some(Ipv4Addr::UNSPECIFIED), Some(Ipv6Addr::UNSPECIFIED)),
            IpAddr::V4(ip) => (Some(ip), None),
            IpAddr::V6(ip) => (None, Some(ip)),
        };
        let (host_v4, host_v6) = (v4.filter(|_| with_v4), v6.filter(|_| with_v6));
        if host_v4.is_none() && host_v6.is_none() {
            return Err(RequestError::Family { host, proto });
        }
        let port = |name, port: Option<u16>| match port {
            Some(0) => Err(RequestError::Port(name)),
            Some(port) => Ok(port),
            None => Err(missing(name)),
        };
        let guest = address("guest_addr", self.guest_addr)?.filter(|ip| !ip.is_unspecified());
        let (host_port, guest_port) =
            (port("host_port", self.host_port)?, port("guest_port", self.guest_port)?);
        Ok(HostForward { is_udp, host_v4, host_v6, host_port, guest, guest_port })
    }
}

/// Parses an address. An empty text stands for none.
fn address(name: &'static str, text: Option<String>) -> Result<Option<IpAddr>, RequestError> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    match text.parse() {
        Ok(ip) => Ok(Some(ip)),
        Err(_) => Err(RequestError::Address { name, text }),
    }
}

/// Forwarded port in the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    pub id: u32,
    pub proto: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_addr: Option<Ipv4Addr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_addr6: Option<Ipv6Addr>,
    pub host_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_addr: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_addr6: Option<IpAddr>,
    pub guest_port: u16,
}

/// Reply of the API socket of slirp4netns, before its encoding as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Added(u32),
    Entries(Vec<Entry>),
    Removed,
    Error(String),
}

impl Reply {
    /// Returns the reply's text.
    pub fn to_json(&self) -> Vec<u8> {
        use serde_json::{Value, json};
        let (outer, inner) = match self {
            Reply::Added(id) => ("return", json!({ "id": id })),
            Reply::Entries(entries) => return write(&Outer { r#return: Entries { entries } }),
            Reply::Removed => ("return", json!({})),
            Reply::Error(desc) => ("error", json!({ "desc": desc })),
        };
        write(&Value::Object([(outer.to_owned(), inner)].into_iter().collect()))
    }
}

#[derive(Serialize)]
struct Outer<'a> {
    r#return: Entries<'a>,
}

#[derive(Serialize)]
struct Entries<'a> {
    entries: &'a [Entry],
}

fn write(value: &impl Serialize) -> Vec<u8> {
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, Spaced);
    // Strings, numbers and a writer without errors cannot fail.
    let _ = value.serialize(&mut serializer);
    text
}

/// Format with a space behind colons and commas, as the manual page prints replies.
struct Spaced;

impl Spaced {
    fn comma<W: ?Sized + io::Write>(to: &mut W, is_first: bool) -> io::Result<()> {
        if is_first { Ok(()) } else { to.write_all(b", ") }
    }
}

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        Spaced::comma(to, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        Spaced::comma(to, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }
}

/// Function of the fuzz target.
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing {
    use super::{HostfwdRequest, REQUEST_MAX, Reply};

    /// Parses arbitrary bytes. An accepted request is valid, and an error makes a valid reply.
    ///
    /// # Panics
    ///
    /// Panics if one of these rules is broken.
    pub fn api_request(data: &[u8]) {
        match HostfwdRequest::parse(data) {
            Ok(HostfwdRequest::Add(forward)) => {
                assert!(forward.host_port > 0 && forward.guest_port > 0, "{forward:?}");
                assert!(forward.host_v4.is_some() || forward.host_v6.is_some(), "{forward:?}");
                assert!(data.len() <= REQUEST_MAX);
            }
            Ok(_) => {}
            Err(error) => {
                let reply = Reply::Error(error.to_string()).to_json();
                let value = serde_json::from_slice::<serde_json::Value>(&reply);
                assert!(value.is_ok_and(|value| value["error"]["desc"].is_string()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn add(arguments: &str) -> Result<HostForward, String> {
        let text = format!("{{\"execute\": \"add_hostfwd\", \"arguments\": {{{arguments}}}}}");
        match HostfwdRequest::parse(text.as_bytes()) {
            Ok(HostfwdRequest::Add(forward)) => Ok(forward),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn examples_of_the_manual_page_are_parsed() {
        let forward = add("\"proto\": \"tcp\", \"host_addr\": \"0.0.0.0\", \"host_port\": 8080, \
             \"guest_addr\": \"10.0.2.100\", \"guest_port\": 80");
        let expected = HostForward {
            is_udp: false,
            host_v4: Some(Ipv4Addr::UNSPECIFIED),
            host_v6: Some(Ipv6Addr::UNSPECIFIED),
            host_port: 8080,
            guest: Some(Ipv4Addr::new(10, 0, 2, 100).into()),
            guest_port: 80,
        };
        assert_eq!(forward, Ok(expected));
        let list = HostfwdRequest::parse(b"{\"execute\": \"list_hostfwd\"}");
        assert_eq!(list.unwrap(), HostfwdRequest::List);
        let remove = b"{\"execute\": \"remove_hostfwd\", \"arguments\": {\"id\": 42}}";
        assert_eq!(HostfwdRequest::parse(remove).unwrap(), HostfwdRequest::Remove(42));
    }

    #[test]
    fn families_follow_from_proto_and_host_address() {
        let families = |proto: &str, host: &str| {
            let text = format!(
                "\"proto\": \"{proto}\", \"host_addr\": \"{host}\", \"host_port\": 1, \"guest_port\": 2"
            );
            add(&text).ok().map(|forward| (forward.host_v4.is_some(), forward.host_v6.is_some()))
        };
        assert_eq!(families("tcp", ""), Some((true, true)));
        assert_eq!(families("udp", "::"), Some((true, true)));
        assert_eq!(families("tcp4", "0.0.0.0"), Some((true, false)));
        assert_eq!(families("udp6", "0.0.0.0"), Some((false, true)));
        assert_eq!(families("tcp", "127.0.0.1"), Some((true, false)));
        assert_eq!(families("tcp", "::1"), Some((false, true)));
        assert_eq!(families("tcp6", "127.0.0.1"), None);
    }

    #[test]
    fn malformed_request_is_rejected_with_its_reason() {
        let port = "\"proto\": \"tcp\", \"guest_port\": 2, \"host_port\"";
        for (arguments, reason) in [
            ("", "add_hostfwd needs `proto`"),
            ("\"proto\": \"sctp\"", "proto `sctp`"),
            (&format!("{port}: 0"), "host_port is not a port"),
            (&format!("{port}: 65536"), "65536"),
            (&format!("{port}: 1, \"host_addr\": \"host\""), "host_addr `host` is not an address"),
        ] {
            let error = add(arguments).unwrap_err();
            assert!(error.starts_with("bad request: ") && error.contains(reason), "{error}");
        }
        let long = vec![b' '; REQUEST_MAX + 1];
        assert!(matches!(HostfwdRequest::parse(&long), Err(RequestError::TooLong)));
        let deep = [vec![b'['; 2000], vec![b']'; 2000]].concat();
        assert!(matches!(HostfwdRequest::parse(&deep), Err(RequestError::Malformed(_))));
        assert!(HostfwdRequest::parse(b"{\"execute\": \"quit\"}").is_err());
    }

    #[test]
    fn replies_have_the_form_of_the_manual_page() {
        let text = |reply: Reply| String::from_utf8(reply.to_json()).unwrap();
        assert_eq!(text(Reply::Added(42)), "{\"return\": {\"id\": 42}}");
        assert_eq!(text(Reply::Removed), "{\"return\": {}}");
        assert_eq!(text(Reply::Error("no".into())), "{\"error\": {\"desc\": \"no\"}}");
        let entry = Entry {
            id: 42,
            proto: "tcp",
            host_addr: Some(Ipv4Addr::UNSPECIFIED),
            host_addr6: Some(Ipv6Addr::UNSPECIFIED),
            host_port: 8080,
            guest_addr: Some(Ipv4Addr::new(10, 0, 2, 100).into()),
            guest_addr6: Some("fd00::100".parse().unwrap()),
            guest_port: 80,
        };
        assert_eq!(
            text(Reply::Entries(vec![entry])),
            "{\"return\": {\"entries\": [{\"id\": 42, \"proto\": \"tcp\", \"host_addr\": \"0.0.0.0\", \
             \"host_addr6\": \"::\", \"host_port\": 8080, \"guest_addr\": \"10.0.2.100\", \
             \"guest_addr6\": \"fd00::100\", \"guest_port\": 80}]}}"
        );
        assert_eq!(text(Reply::Entries(Vec::new())), "{\"return\": {\"entries\": []}}");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_parsed_or_rejected(data in proptest::collection::vec(any::<u8>(), 0..64)) {
            fuzzing::api_request(&data);
        }

        #[test]
        fn arbitrary_arguments_are_parsed_or_rejected(
            execute in "(add|list|remove)_hostfwd",
            arguments in proptest::collection::vec(
                ("(proto|host_addr|host_port|guest_addr|guest_port|id)", "(\"(tcp6?|udp4?|::1?|10\\.0\\.2\\.100)\"|[0-9]{1,6}|null|\\[\\])"),
                0..7,
            ),
        ) {
            let arguments: Vec<_> = arguments.iter().map(|(name, value)| format!("\"{name}\": {value}")).collect();
            let text = format!("{{\"execute\": \"{execute}\", \"arguments\": {{{}}}}}", arguments.join(", "));
            fuzzing::api_request(text.as_bytes());
        }
    }
}
