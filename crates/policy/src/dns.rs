//! DNS messages: queries of the guest, rewritten queries for the server, answers.
//!
//! A query is written anew, so that only the name, the type, the id and a few flags reach the server. An
//! answer goes to the guest unchanged, except that its question is spelled as the guest spelled it. Of an answer, only
//! header, question and answer section are read (`records`).

mod records;

use core::net::IpAddr;

use hickory_proto::op::{Message, MessageType, OpCode};
use hickory_proto::rr::{DNSClass, RecordType};

use crate::name::HostName;
use ringfence_base::numbers::bounded;

/// Maximum length of a query in bytes.
pub const QUERY_MAX: usize = 1232;
/// Payload size in bytes that queries offer to the server, at least. The answer comes as one datagram, so that
/// the guest need not repeat the query over TCP.
const PAYLOAD_MIN: u16 = 4096;
/// Maximum length in bytes of an answer in one datagram to a guest whose query offers no size.
const DATAGRAM_MAX: usize = 4096;
/// Minimum of the size that a query can offer (RFC 6891, 6.2.3).
const DATAGRAM_MIN: u16 = 512;
/// Length of a message's header in bytes.
const HEADER: usize = 12;
/// Flag of a message that is an answer.
const RESPONSE: u16 = 0x8000;
/// Flag of an answer that is incomplete (TC).
const TRUNCATED: u16 = 0x0200;
/// Flags of a query that reach the server: RD, AD, CD.
const FLAGS_KEPT: u16 = 0x0100 | 0x0020 | 0x0010;

/// Answer codes of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The name exists, but has no record of this type.
    NoData = 0,
    FormErr = 1,
    ServFail = 2,
    NxDomain = 3,
    NotImp = 4,
    Refused = 5,
}

/// Query of the guest that has one question of class IN.
#[derive(Clone, Debug)]
pub struct Query {
    id: u16,
    flags: u16,
    /// Name, type and class as the guest wrote them.
    question: Vec<u8>,
    /// Name without its case. `None` if no rule can have such a name.
    name: Option<HostName>,
    kind: RecordType,
    /// Payload size and DO flag of an EDNS query.
    edns: Option<(u16, bool)>,
}

/// Results of bytes that are no acceptable query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotAQuery {
    /// The bytes get no reply.
    Ignore,
    /// The query gets this reply.
    Reply(Vec<u8>),
}

impl Query {
    /// Parses a query.
    ///
    /// # Errors
    ///
    /// Returns [`NotAQuery`] if the bytes are not a query with one question.
    pub fn parse(bytes: &[u8]) -> Result<Query, NotAQuery> {
        let Some(&[i0, i1, f0, f1]) = bytes.first_chunk() else { return Err(NotAQuery::Ignore) };
        let (id, flags) = (u16::from_be_bytes([i0, i1]), u16::from_be_bytes([f0, f1]));
        if bytes.len() < HEADER || bytes.len() > QUERY_MAX || flags & 0x8000 != 0 {
            return Err(NotAQuery::Ignore);
        }
        let refuse = |code| NotAQuery::Reply(bare_reply(id, flags, code, &[]));
        let message = Message::from_vec(bytes).map_err(|_| refuse(Code::FormErr))?;
        if message.metadata.message_type != MessageType::Query {
            return Err(NotAQuery::Ignore);
        }
        if message.metadata.op_code != OpCode::Query {
            return Err(refuse(Code::NotImp));
        }
        let [query] = &message.queries[..] else { return Err(refuse(Code::FormErr)) };
        let question = question(bytes).ok_or_else(|| refuse(Code::FormErr))?.to_vec();
        if query.query_class != DNSClass::IN {
            return Err(NotAQuery::Reply(bare_reply(id, flags, Code::Refused, &question)));
        }
        let edns = message.edns.as_ref().map(|edns| (edns.max_payload(), edns.flags().dnssec_ok));
        let name = HostName::from_labels(query.name.iter());
        Ok(Query { id, flags, question, name, kind: query.query_type, edns })
    }

    /// Returns the id of the query.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns the name asked for. `None` if no rule can have such a name.
    pub fn name(&self) -> Option<&HostName> {
        self.name.as_ref()
    }

    /// Returns the type of record asked for.
    pub fn kind(&self) -> RecordType {
        self.kind
    }

    /// Returns `true` for types whose answers carry addresses, or keys for encrypted hellos, beside the records
    /// that pins are made of: SVCB and HTTPS (RFC 9460).
    pub fn is_service_binding(&self) -> bool {
        matches!(self.kind, RecordType::SVCB | RecordType::HTTPS)
    }

    /// Returns `true` for queries for the addresses of a name.
    pub fn is_for_addresses(&self) -> bool {
        matches!(self.kind, RecordType::A | RecordType::AAAA)
    }

    /// Returns `true` for queries for IPv4 addresses.
    pub fn is_for_v4(&self) -> bool {
        self.kind == RecordType::A
    }

    /// Returns `true` for transfers of zones, and for all records at once.
    pub fn is_bulk(&self) -> bool {
        matches!(self.kind, RecordType::ANY | RecordType::AXFR | RecordType::IXFR)
    }

    /// Writes the query for the server.
    pub fn to_server(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.question.len() + 11);
        for word in [self.id, self.flags & FLAGS_KEPT, 1, 0, 0, 1] {
            bytes.extend_from_slice(&word.to_be_bytes());
        }
        bytes.extend(self.question_for_server());
        let (payload, dnssec_ok) = self.edns.unwrap_or_default();
        let flags = if dnssec_ok { 0x8000 } else { 0 };
        write_opt(&mut bytes, payload.max(PAYLOAD_MIN), flags, &[]);
        bytes
    }

    fn question_for_server(&self) -> Vec<u8> {
        let name_len = self.question.len() - 4;
        let mut question = self.question.clone();
        // Lengths of labels are below 64, where ASCII has no letters.
        question[..name_len].make_ascii_lowercase();
        question
    }

    /// Writes a reply without records.
    pub fn reply(&self, code: Code) -> Vec<u8> {
        let mut reply = bare_reply(self.id, self.flags, code, &self.question);
        if self.edns.is_some() {
            reply[11] = 1;
            // Extended error 18, "Prohibited" (RFC 8914, 4.19).
            let prohibited = [0, 15, 0, 2, 0, 18];
            let options: &[u8] = if code == Code::Refused { &prohibited } else { &[] };
            write_opt(&mut reply, PAYLOAD_MIN, 0, options);
        }
        reply
    }

    /// Returns `true` for queries of type TXT.
    pub fn is_text(&self) -> bool {
        self.kind == RecordType::TXT
    }

    /// Writes a reply with one TXT record, of any length, that no cache keeps.
    pub fn text_reply(&self, text: &str) -> Vec<u8> {
        /// Maximum length of a string of a TXT record (RFC 1035, 3.3.14).
        const STRING_MAX: usize = 255;
        let mut data = Vec::new();
        for part in text.as_bytes().chunks(STRING_MAX) {
            data.extend_from_slice(&bounded(part.len(), u8::MAX).to_be_bytes());
            data.extend_from_slice(part);
        }
        self.record_reply(0, &data)
    }

    /// Writes a reply with one address, which must be of the type asked for. Its time to live is in seconds.
    pub fn address_reply(&self, ip: IpAddr, ttl: u32) -> Vec<u8> {
        match ip {
            IpAddr::V4(ip) => self.record_reply(ttl, &ip.octets()),
            IpAddr::V6(ip) => self.record_reply(ttl, &ip.octets()),
        }
    }

    /// Writes a reply with one record of the name and type asked for.
    fn record_reply(&self, ttl: u32, data: &[u8]) -> Vec<u8> {
        let mut reply = bare_reply(self.id, self.flags, Code::NoData, &self.question);
        reply[7] = 1;
        // The name is that of the question; class IN.
        for word in [0xc00c, u16::from(self.kind), 1] {
            reply.extend_from_slice(&word.to_be_bytes());
        }
        reply.extend_from_slice(&ttl.to_be_bytes());
        reply.extend_from_slice(&bounded(data.len(), u16::MAX).to_be_bytes());
        reply.extend_from_slice(data);
        if self.edns.is_some() {
            reply[11] = 1;
            write_opt(&mut reply, PAYLOAD_MIN, 0, &[]);
        }
        reply
    }

    /// Writes a reply that makes the guest ask again over TCP.
    pub fn truncated(&self) -> Vec<u8> {
        let mut reply = self.reply(Code::NoData);
        let flags = word(&reply, 2) | TRUNCATED;
        reply[2..4].copy_from_slice(&flags.to_be_bytes());
        reply
    }

    /// Returns the maximum length in bytes of an answer in one datagram.
    pub fn datagram_max(&self) -> usize {
        self.edns.map_or(DATAGRAM_MAX, |(payload, _)| payload.max(DATAGRAM_MIN).into())
    }

    /// Reads the server's answer. Spells its question as the guest did. Returns `None` if the bytes do not
    /// answer this query.
    pub fn read_answer(&self, bytes: &mut [u8]) -> Option<Answer> {
        let flags = word(bytes, 2);
        if bytes.len() < HEADER || word(bytes, 0) != self.id || flags & RESPONSE == 0 {
            return None;
        }
        let is_truncated = flags & TRUNCATED != 0;
        let (questions, answers) = (word(bytes, 4), word(bytes, 6));
        if questions == 0 && answers == 0 {
            // Servers answer a query that they do not understand by its header alone.
            return Some(Answer { addresses: None, is_truncated });
        }
        let end = HEADER + self.question.len();
        let question = bytes.get_mut(HEADER..end).filter(|_| questions == 1)?;
        let (name, numbers) = self.question.split_at(self.question.len() - 4);
        let (their_name, their_numbers) = question.split_at(name.len());
        if !their_name.eq_ignore_ascii_case(name) || their_numbers != numbers {
            return None;
        }
        question.copy_from_slice(&self.question);
        let addresses = records::addresses(bytes, HEADER, end, answers);
        Some(Answer { addresses, is_truncated })
    }
}

/// Answer of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Addresses of the name asked for, or of its aliases, with their time to live in seconds. `None` if the answer section
    /// cannot be read.
    pub addresses: Option<Vec<(IpAddr, u32)>>,
    /// The answer is incomplete: the whole one is available over TCP.
    pub is_truncated: bool,
}

/// Returns two bytes of a message as a number, or 0 behind its end.
fn word(bytes: &[u8], at: usize) -> u16 {
    match bytes.get(at..at + 2) {
        Some(&[high, low]) => u16::from_be_bytes([high, low]),
        _ => 0,
    }
}

/// Returns the question of a message: its bytes from the name to the class. `None` if the name is compressed.
fn question(bytes: &[u8]) -> Option<&[u8]> {
    let mut at = HEADER;
    loop {
        let len = usize::from(*bytes.get(at)?);
        at += 1 + len;
        match len {
            0 => return bytes.get(HEADER..at + 4),
            1..=63 if at - HEADER <= 255 => {}
            _ => return None,
        }
    }
}

fn bare_reply(id: u16, flags: u16, code: Code, question: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + question.len() + 17);
    // QR and RA; opcode, RD and CD as in the query.
    let flags = 0x8080 | flags & 0x7910 | code as u16;
    for word in [id, flags, u16::from(!question.is_empty()), 0, 0, 0] {
        bytes.extend_from_slice(&word.to_be_bytes());
    }
    bytes.extend_from_slice(question);
    bytes
}

/// Writes an OPT record (RFC 6891, 6.1.2).
fn write_opt(bytes: &mut Vec<u8>, payload: u16, flags: u16, options: &[u8]) {
    bytes.extend_from_slice(&[0, 0, 41]);
    bytes.extend_from_slice(&payload.to_be_bytes());
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&bounded(options.len(), u16::MAX).to_be_bytes());
    bytes.extend_from_slice(options);
}

#[cfg(test)]
pub(crate) mod tests;
