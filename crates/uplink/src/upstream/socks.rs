//! SOCKS version 5 (RFC 1928), with user and password (RFC 1929): the client's side.
//!
//! ```text
//! client:  methods            user, password          request
//! proxy:            method                    status           reply
//! ```
//!
//! Each answer has a length that its first bytes determine: at most 262 bytes. A refusal counts as soon as it is known.

use core::net::IpAddr;

use ringfence_sys::numbers::bounded;

use super::fault::ProxyFault;
use super::settings::Credentials;
use super::step::Step;
use super::target::{Target, TargetHost};

const VERSION: u8 = 5;
/// Version of the exchange of user and password.
const SUB_VERSION: u8 = 1;
const METHOD_NONE: u8 = 0;
const METHOD_PASSWORD: u8 = 2;
const METHOD_UNACCEPTABLE: u8 = 0xff;
const CONNECT: u8 = 1;
const ADDRESS_V4: u8 = 1;
const ADDRESS_NAME: u8 = 3;
const ADDRESS_V6: u8 = 4;

/// Answer that the client waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Method,
    Status,
    Reply,
}

/// Client of a proxy.
#[derive(Debug)]
pub struct Client {
    awaited: Awaited,
    /// Bytes of the answer so far.
    answer: Vec<u8>,
    /// Exchange of user and password, if there are some.
    credentials: Option<Vec<u8>>,
    request: Vec<u8>,
}

impl Client {
    /// Creates a client. Returns it with its first message.
    pub fn start(target: &Target, credentials: Option<&Credentials>) -> (Client, Vec<u8>) {
        let hello = match credentials {
            Some(_) => vec![VERSION, 2, METHOD_NONE, METHOD_PASSWORD],
            None => vec![VERSION, 1, METHOD_NONE],
        };
        let credentials = credentials.map(|Credentials { user, password }| {
            let mut message = vec![SUB_VERSION];
            push_sized(&mut message, user);
            push_sized(&mut message, password);
            message
        });
        let (awaited, request) = (Awaited::Method, request(target));
        (Client { awaited, answer: Vec::new(), credentials, request }, hello)
    }

    /// Reads bytes of the proxy.
    ///
    /// # Errors
    ///
    /// Returns the refusal of the proxy, or the rule that its answer breaks.
    pub fn read(&mut self, bytes: &[u8]) -> Result<Step, ProxyFault> {
        for (at, &byte) in bytes.iter().enumerate() {
            self.answer.push(byte);
            let Some(send) = self.advance()? else { continue };
            self.answer.clear();
            let is_done = send.is_empty();
            return Ok(Step { consumed: at + 1, send, is_done });
        }
        Ok(Step { consumed: bytes.len(), ..Step::default() })
    }

    /// Acts on the answer so far. Returns the next message if the answer is complete: an empty one at the end.
    fn advance(&mut self) -> Result<Option<Vec<u8>>, ProxyFault> {
        match (self.awaited, &self.answer[..]) {
            (Awaited::Method | Awaited::Reply, [VERSION]) | (Awaited::Status, [SUB_VERSION]) => {
                Ok(None)
            }
            (Awaited::Method, [VERSION, METHOD_NONE]) => Ok(Some(self.send_request())),
            (Awaited::Method, [VERSION, METHOD_PASSWORD]) => {
                let credentials = self.credentials.take().ok_or(ProxyFault::NotSocks)?;
                self.awaited = Awaited::Status;
                Ok(Some(credentials))
            }
            (Awaited::Method, [VERSION, METHOD_UNACCEPTABLE]) => Err(ProxyFault::NoMethod),
            (Awaited::Status, [SUB_VERSION, 0]) => Ok(Some(self.send_request())),
            (Awaited::Status, [SUB_VERSION, _]) => Err(ProxyFault::Credentials),
            (Awaited::Reply, [VERSION, 0, rest @ ..]) => {
                let address = match rest {
                    [] | [0] | [0, ADDRESS_NAME] => return Ok(None),
                    [0, ADDRESS_V4, ..] => 4,
                    [0, ADDRESS_V6, ..] => 16,
                    [0, ADDRESS_NAME, length, ..] => 1 + usize::from(*length),
                    _ => return Err(ProxyFault::NotSocks),
                };
                // The address has a port behind it.
                Ok((rest.len() >= 2 + address + 2).then(Vec::new))
            }
            (Awaited::Reply, [VERSION, refusal]) => Err(ProxyFault::Reply(*refusal)),
            _ => Err(ProxyFault::NotSocks),
        }
    }

    fn send_request(&mut self) -> Vec<u8> {
        self.awaited = Awaited::Reply;
        core::mem::take(&mut self.request)
    }
}

/// Writes the request for a connection.
fn request(target: &Target) -> Vec<u8> {
    let mut request = vec![VERSION, CONNECT, 0];
    match &target.host {
        TargetHost::Name(name) => {
            request.push(ADDRESS_NAME);
            push_sized(&mut request, name.as_str());
        }
        TargetHost::Address(IpAddr::V4(ip)) => {
            request.push(ADDRESS_V4);
            request.extend_from_slice(&ip.octets());
        }
        TargetHost::Address(IpAddr::V6(ip)) => {
            request.push(ADDRESS_V6);
            request.extend_from_slice(&ip.octets());
        }
    }
    request.extend_from_slice(&target.port.to_be_bytes());
    request
}

/// Appends a text of at most 255 bytes, behind its length.
fn push_sized(message: &mut Vec<u8>, text: &str) {
    message.extend_from_slice(&bounded(text.len(), u8::MAX).to_be_bytes());
    message.extend_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(host: TargetHost) -> Target {
        Target { host, port: 0x1bb }
    }

    fn name() -> Target {
        target(TargetHost::Name(ringfence_policy::HostName::parse("a.org").unwrap()))
    }

    fn client(password: Option<&str>) -> (Client, Vec<u8>) {
        let credentials = password.map(|text| Credentials::parse(text).unwrap());
        Client::start(&name(), credentials.as_ref())
    }

    const REQUEST: &[u8] = b"\x05\x01\0\x03\x05a.org\x01\xbb";

    #[test]
    fn client_without_password_asks_for_the_name() {
        let (mut client, hello) = client(None);
        assert_eq!(hello, [5, 1, 0]);
        let step = client.read(&[5, 0, 5]).unwrap();
        assert_eq!((step.consumed, &step.send[..], step.is_done), (2, REQUEST, false));
        let step = client.read(b"\x05\0\0\x01\x7f\0\0\x01\0\x50hello").unwrap();
        assert_eq!(step, Step { consumed: 10, send: Vec::new(), is_done: true });
    }

    #[test]
    fn password_is_sent_if_the_proxy_asks() {
        let (mut one, hello) = client(Some("u:pw"));
        assert_eq!(hello, [5, 2, 0, 2]);
        assert_eq!(one.read(&[5, 2]).unwrap().send, b"\x01\x01u\x02pw");
        assert_eq!(one.read(&[1, 0]).unwrap().send, REQUEST);
        let (mut other, _) = client(Some("u:pw"));
        assert_eq!(other.read(&[5, 0]).unwrap().send, REQUEST);
        let (mut refused, _) = client(Some("u:pw"));
        refused.read(&[5, 2]).unwrap();
        assert_eq!(refused.read(&[1, 1]), Err(ProxyFault::Credentials));
        let (mut bare, _) = client(None);
        assert_eq!(bare.read(&[5, 2]), Err(ProxyFault::NotSocks), "it was not offered");
        let (mut bare, _) = client(None);
        assert_eq!(bare.read(&[5, 0xff]), Err(ProxyFault::NoMethod));
    }

    #[test]
    fn reply_of_each_address_type_is_read_to_its_end() {
        let bodies: [&[u8]; 4] = [b"\x01abcd", b"\x04abcdabcdabcdabcd", b"\x03\x03abc", b"\x03\0"];
        for body in bodies {
            let (mut client, _) = client(None);
            client.read(&[5, 0]).unwrap();
            let reply = [b"\x05\0\0", body, b"\0\x50", b"rest"].concat();
            let step = client.read(&reply).unwrap();
            assert!(step.is_done && &reply[step.consumed..] == b"rest", "{}", body.escape_ascii());
        }
    }

    #[test]
    fn refusal_is_known_at_its_second_byte() {
        for refusal in 1..=9 {
            let (mut client, _) = client(None);
            client.read(&[5, 0]).unwrap();
            assert_eq!(client.read(&[5, refusal]), Err(ProxyFault::Reply(refusal)));
            assert!(ProxyFault::Reply(refusal).to_string().contains(&format!("reply {refusal}")));
        }
    }

    #[test]
    fn answer_of_another_protocol_is_refused_at_its_first_wrong_byte() {
        for answer in [
            &b"H"[..],
            b"\x04",
            b"\x05\x01",
            b"\x05\0\x01",
            b"\x05\0\x05\0\x01",
            b"\x05\0\x05\0\0\x02",
        ] {
            let (mut client, _) = client(None);
            let mut rest = answer;
            let fault = loop {
                match client.read(rest) {
                    Ok(step) if step.consumed < rest.len() => rest = &rest[step.consumed..],
                    other => break other.err(),
                }
            };
            assert_eq!(fault, Some(ProxyFault::NotSocks), "{}", answer.escape_ascii());
        }
    }

    #[test]
    fn request_carries_literal_addresses() {
        let v4 = request(&target(TargetHost::Address([192, 0, 2, 1].into())));
        assert_eq!(v4, b"\x05\x01\0\x01\xc0\0\x02\x01\x01\xbb");
        let v6 = request(&target(TargetHost::Address("2001:db8::1".parse().unwrap())));
        assert_eq!((v6[3], v6.len()), (ADDRESS_V6, 4 + 16 + 2));
    }
}
