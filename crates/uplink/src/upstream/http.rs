//! Method CONNECT of HTTP/1.1 (RFC 9110, 9.3.6): request and reply.
//!
//! The reply of a proxy is foreign. Its status line decides; its header fields are skipped. A reply of status 1xx precedes
//! another one. Behind the empty line of a reply of status 2xx there is no content, whatever its fields say.

use super::fault::ProxyFault;
use super::settings::Credentials;
use super::step::Step;
use super::target::Target;

/// Maximum length of all replies to a request in bytes.
pub const REPLY_MAX: usize = 16 << 10;
/// Maximum length of a status line in bytes.
pub const STATUS_LINE_MAX: usize = 1024;
/// Beginning of a status line.
const VERSION: &[u8] = b"HTTP/1.";

/// Writes the request for a connection.
pub fn request(target: &Target, credentials: Option<&Credentials>) -> Vec<u8> {
    let mut request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n");
    if let Some(Credentials { user, password }) = credentials {
        let basic = base64(format!("{user}:{password}").as_bytes());
        request.push_str(&format!("Proxy-Authorization: Basic {basic}\r\n"));
    }
    request.push_str("\r\n");
    request.into_bytes()
}

/// Encodes bytes in base 64 (RFC 4648, 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let mut three = [0; 3];
        three[..chunk.len()].copy_from_slice(chunk);
        let bits = u32::from_be_bytes([0, three[0], three[1], three[2]]);
        for digit in 0..4_usize {
            let index = (bits >> (18 - 6 * digit)) & 0x3f;
            let is_padding = digit > chunk.len();
            text.push(if is_padding { '=' } else { char::from(DIGITS[index as usize]) });
        }
    }
    text
}

/// Part of a reply that is being read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    StatusLine,
    /// Header fields of a reply.
    Fields { is_final: bool },
}

/// Reader of the replies to a request.
#[derive(Debug, Default)]
pub struct Reply {
    part: Part,
    status_line: Vec<u8>,
    /// The line that is being read has a character.
    is_in_line: bool,
    /// Number of bytes so far.
    read: usize,
}

impl Reply {
    /// Reads bytes of the proxy.
    ///
    /// # Errors
    ///
    /// Returns the status of a reply that is no success, as soon as it is known, or the rule that the reply breaks.
    pub fn read(&mut self, bytes: &[u8]) -> Result<Step, ProxyFault> {
        for (at, &byte) in bytes.iter().enumerate() {
            self.read += 1;
            if self.read > REPLY_MAX {
                return Err(ProxyFault::TooLong);
            }
            let is_done = match self.part {
                Part::StatusLine => self.read_status_line(byte)?,
                Part::Fields { is_final } => self.is_end_of_fields(byte) && is_final,
            };
            if is_done {
                return Ok(Step { consumed: at + 1, send: Vec::new(), is_done });
            }
        }
        Ok(Step { consumed: bytes.len(), ..Step::default() })
    }

    /// Adds a byte to the status line. Returns `false`: fields follow.
    fn read_status_line(&mut self, byte: u8) -> Result<bool, ProxyFault> {
        if byte == b'\n' {
            let is_final = match status(&self.status_line).ok_or(ProxyFault::NotHttp)? {
                100 | 102..200 => false,
                200..300 => true,
                other => return Err(ProxyFault::Status(other)),
            };
            self.part = Part::Fields { is_final };
            self.is_in_line = false;
            return Ok(false);
        }
        if VERSION.get(self.status_line.len()).is_some_and(|&expected| expected != byte) {
            return Err(ProxyFault::NotHttp);
        }
        if self.status_line.len() >= STATUS_LINE_MAX {
            return Err(ProxyFault::TooLong);
        }
        self.status_line.push(byte);
        Ok(false)
    }

    /// Reads a byte of the fields. Returns `true` at their end; another reply may follow.
    fn is_end_of_fields(&mut self, byte: u8) -> bool {
        match byte {
            b'\n' if !self.is_in_line => {
                self.part = Part::StatusLine;
                self.status_line.clear();
                return true;
            }
            b'\n' => self.is_in_line = false,
            b'\r' => {}
            _ => self.is_in_line = true,
        }
        false
    }
}

/// Returns the status of a status line. `None` if the line is none of HTTP/1.
fn status(line: &[u8]) -> Option<u16> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let [minor, b' ', digits @ ..] = line.strip_prefix(VERSION)? else { return None };
    let (digits, rest) = digits.split_at_checked(3)?;
    let is_wrong = |byte: &u8| !byte.is_ascii_digit();
    if is_wrong(minor) || digits.iter().any(is_wrong) || !matches!(rest, [] | [b' ', ..]) {
        return None;
    }
    let status = digits.iter().fold(0, |status, digit| status * 10 + u16::from(digit - b'0'));
    (100..600).contains(&status).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::super::target::TargetHost;
    use super::*;

    fn read(reply: &[u8]) -> Result<Step, ProxyFault> {
        Reply::default().read(reply)
    }

    /// Returns the bytes behind the reply.
    fn opened(reply: &[u8]) -> Vec<u8> {
        let step = read(reply).unwrap();
        assert!(step.is_done && step.send.is_empty(), "{}", reply.escape_ascii());
        reply[step.consumed..].to_vec()
    }

    #[test]
    fn request_names_target_and_encodes_credentials() {
        let target = |host: &str| {
            let name = ringfence_policy::HostName::parse(host);
            let host =
                name.map_or_else(|_| TargetHost::Address(host.parse().unwrap()), TargetHost::Name);
            Target { host, port: 443 }
        };
        let credentials = Credentials::parse("Aladdin:open sesame\n").unwrap();
        assert_eq!(
            String::from_utf8(request(&target("a.org"), Some(&credentials))).unwrap(),
            "CONNECT a.org:443 HTTP/1.1\r\nHost: a.org:443\r\n\
             Proxy-Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n\r\n"
        );
        assert_eq!(
            String::from_utf8(request(&target("2001:db8::1"), None)).unwrap(),
            "CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n\r\n"
        );
    }

    #[test]
    fn base64_pads_as_the_rfc_says() {
        let encoded =
            ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|text| base64(text.as_bytes()));
        assert_eq!(encoded, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"]);
    }

    #[test]
    fn success_ends_at_the_empty_line_and_no_byte_behind_is_read() {
        for reply in [
            "HTTP/1.1 200 Connection established\r\n\r\n",
            "HTTP/1.0 200\r\n\r\n",
            "HTTP/1.1 299 x\nA: b\n\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n",
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        ] {
            assert_eq!(opened(reply.as_bytes()), b"", "{reply:?}");
            assert_eq!(opened(format!("{reply}SSH-2.0-x\r\n").as_bytes()), b"SSH-2.0-x\r\n");
        }
        assert!(!read(b"HTTP/1.1 200 OK\r\nA: b\r\n").unwrap().is_done);
    }

    #[test]
    fn refusal_is_known_at_the_end_of_the_status_line() {
        for status in [101, 300, 403, 407, 500, 502, 599] {
            let reply = format!("HTTP/1.1 {status} No\r\n");
            assert_eq!(read(reply.as_bytes()), Err(ProxyFault::Status(status)));
            assert!(ProxyFault::Status(status).to_string().contains(&status.to_string()));
        }
    }

    #[test]
    fn reply_that_is_not_http_is_refused_at_once() {
        for reply in [
            "SSH",
            "\r\n",
            "http/1.1",
            "HTTP/2",
            "\0",
            "\x05\x00",
            "HTTP/1.1 20\n",
            "HTTP/1.1 2000\n",
            "HTTP/1.1  200\n",
            "HTTP/1.1\t200\n",
            "HTTP/1.x 200\n",
            "HTTP/1.1 099\n",
            "HTTP/1.1 600\n",
            "HTTP/1.1 200x\n",
            "\n",
        ] {
            assert_eq!(read(reply.as_bytes()), Err(ProxyFault::NotHttp), "{reply:?}");
        }
    }

    #[test]
    fn reply_beyond_its_limits_is_refused() {
        let long_line = format!("HTTP/1.1 200 {}", "x".repeat(STATUS_LINE_MAX));
        assert_eq!(read(long_line.as_bytes()), Err(ProxyFault::TooLong));
        let with_fields = |len: usize| format!("HTTP/1.1 200 OK\r\nA: {}\r\n\r\n", "x".repeat(len));
        let rest = with_fields(0).len();
        assert!(read(with_fields(REPLY_MAX - rest).as_bytes()).unwrap().is_done);
        assert_eq!(read(with_fields(REPLY_MAX - rest + 1).as_bytes()), Err(ProxyFault::TooLong));
        // Replies before the final one count, too.
        let many = "HTTP/1.1 100 Continue\r\n\r\n".repeat(REPLY_MAX / 25 + 1);
        assert_eq!(read(many.as_bytes()), Err(ProxyFault::TooLong));
    }
}
