//! DNS messages: queries of the guest, rewritten queries for the server, answers.
//!
//! A query is written anew, so that only the name, the type, the id and a few flags reach the server. An
//! answer goes to the guest unchanged, except that its question is spelled as the guest spelled it.

use core::net::IpAddr;
use std::collections::HashSet;

use hickory_proto::op::{Message, MessageType, OpCode};
use hickory_proto::rr::{DNSClass, Name, RData, RecordType};

use crate::name::HostName;
use ringfence_base::numbers::bounded;

/// Maximum length of a query in bytes.
pub const QUERY_MAX: usize = 1232;
/// Payload size in bytes that queries offer to the server, at least. The answer comes as one datagram, so that
/// the guest need not repeat the query over TCP.
const PAYLOAD_MIN: u16 = 4096;
/// Length of a message's header in bytes.
const HEADER: usize = 12;
/// Flags of a query that reach the server: RD, AD, CD.
const FLAGS_KEPT: u16 = 0x0100 | 0x0020 | 0x0010;
/// Maximum number of aliases from the name asked for to its addresses.
const ALIASES_MAX: usize = 16;

/// Answer codes of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The name exists, but has no record of this type.
    NoData = 0,
    FormErr = 1,
    ServFail = 2,
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

    /// Reads the server's answer. Spells its question as the guest did. Returns `None` if the bytes do not
    /// answer this query.
    pub fn read_answer(&self, bytes: &mut [u8]) -> Option<Answer> {
        let message = Message::from_vec(bytes).ok()?;
        let is_answer = message.metadata.message_type == MessageType::Response
            && message.metadata.id == self.id
            && message.queries.len() == 1;
        let end = HEADER + self.question.len();
        let question = bytes.get_mut(HEADER..end).filter(|_| is_answer)?;
        let (name, numbers) = self.question.split_at(self.question.len() - 4);
        let (their_name, their_numbers) = question.split_at(name.len());
        if !their_name.eq_ignore_ascii_case(name) || their_numbers != numbers {
            return None;
        }
        question.copy_from_slice(&self.question);
        Some(Answer { addresses: addresses(&message) })
    }
}

/// Addresses in the server's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Addresses of the name asked for, or of its aliases, with their time to live in seconds.
    pub addresses: Vec<(IpAddr, u32)>,
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

/// Returns the addresses to which the question's name leads by the records of the answer section. The other
/// sections may be about any name, so nobody reads them.
fn addresses(message: &Message) -> Vec<(IpAddr, u32)> {
    let Some(query) = message.queries.first() else { return Vec::new() };
    let mut owners: HashSet<&Name> = HashSet::from([&query.name]);
    // The records may come in any order.
    for _ in 0..ALIASES_MAX {
        let before = owners.len();
        for record in &message.answers {
            if let RData::CNAME(alias) = &record.data
                && record.dns_class == DNSClass::IN
                && owners.contains(&record.name)
                && owners.len() <= ALIASES_MAX
            {
                owners.insert(&alias.0);
            }
        }
        if owners.len() == before {
            break;
        }
    }
    let of_owners = message
        .answers
        .iter()
        .filter(|record| record.dns_class == DNSClass::IN && owners.contains(&record.name));
    of_owners
        .filter_map(|record| match &record.data {
            RData::A(ip) => Some((ip.0.into(), record.ttl)),
            RData::AAAA(ip) => Some((ip.0.into(), record.ttl)),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
pub(crate) mod tests;
