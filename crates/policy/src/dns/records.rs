//! Records of an answer section (RFC 1035, 4.1.3 and 4.1.4).
//!
//! Only names, aliases and addresses are read; the data of other types is skipped by its length. The sections behind the
//! answers may be about any name, so nobody reads them, and what they contain does not matter.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::HashSet;

use super::word;

/// Maximum number of aliases from the name asked for to its addresses.
const ALIASES_MAX: usize = 16;
/// Maximum length of a name in bytes, without its root label.
const NAME_MAX: usize = 254;
/// Class of records of the Internet.
const CLASS_IN: u16 = 1;

/// Name in lower case: the labels with their lengths, without the root.
type Labels = Vec<u8>;

enum Data {
    Alias(Labels),
    Address(IpAddr),
}

struct Answered {
    owner: Labels,
    ttl: u32,
    data: Data,
}

/// Returns the addresses to which the name at the offset `question` leads by the `count` records from the offset `start` on.
/// Returns `None` if one of the records is malformed.
pub(super) fn addresses(
    bytes: &[u8],
    question: usize,
    start: usize,
    count: u16,
) -> Option<Vec<(IpAddr, u32)>> {
    let (asked, _) = name(bytes, question)?;
    let (mut records, mut at) = (Vec::new(), start);
    for _ in 0..count {
        let (owner, behind) = name(bytes, at)?;
        let fixed = bytes.get(behind..behind + 10)?;
        let (kind, class) = (word(fixed, 0), word(fixed, 2));
        let ttl = u32::from(word(fixed, 4)) << 16 | u32::from(word(fixed, 6));
        let data_start = behind + 10;
        at = data_start + usize::from(word(fixed, 8));
        let data = bytes.get(data_start..at)?;
        if class == CLASS_IN
            && let Some(data) = read(bytes, kind, data_start, data)?
        {
            records.push(Answered { owner, ttl, data });
        }
    }
    Some(follow(asked, &records))
}

/// Reads the data of a record. `Some(None)` for types that lead nowhere, `None` for malformed data.
fn read(bytes: &[u8], kind: u16, start: usize, data: &[u8]) -> Option<Option<Data>> {
    /// Numbers of the types (RFC 1035, 3.2.2; RFC 3596, 2.1).
    const A: u16 = 1;
    const CNAME: u16 = 5;
    const AAAA: u16 = 28;
    Some(Some(match kind {
        A => Data::Address(Ipv4Addr::from(<[u8; 4]>::try_from(data).ok()?).into()),
        AAAA => Data::Address(Ipv6Addr::from(<[u8; 16]>::try_from(data).ok()?).into()),
        CNAME => {
            let (alias, end) = name(bytes, start)?;
            (end == start + data.len()).then_some(Data::Alias(alias))?
        }
        _ => return Some(None),
    }))
}

/// Returns the addresses of a name and of its aliases. The records may come in any order.
fn follow(asked: Labels, records: &[Answered]) -> Vec<(IpAddr, u32)> {
    let mut owners = HashSet::from([asked]);
    for _ in 0..ALIASES_MAX {
        let before = owners.len();
        for record in records {
            if let Data::Alias(alias) = &record.data
                && owners.contains(&record.owner)
                && owners.len() <= ALIASES_MAX
            {
                owners.insert(alias.clone());
            }
        }
        if owners.len() == before {
            break;
        }
    }
    let of_owners = records.iter().filter(|record| owners.contains(&record.owner));
    of_owners
        .filter_map(|record| match record.data {
            Data::Address(ip) => Some((ip, record.ttl)),
            Data::Alias(_) => None,
        })
        .collect()
}

/// Reads a name, which may be compressed. Returns it with the offset behind it. Each pointer leads further back than the one
/// before, so the reading ends.
fn name(bytes: &[u8], start: usize) -> Option<(Labels, usize)> {
    let (mut labels, mut at, mut part, mut end) = (Vec::new(), start, start, None);
    loop {
        let len = *bytes.get(at)?;
        match len {
            0 => return Some((labels, end.unwrap_or(at + 1))),
            1..=63 => {
                let behind = at + 1 + usize::from(len);
                // Lengths are below 64, where ASCII has no letters.
                labels.extend(bytes.get(at..behind)?.to_ascii_lowercase());
                if labels.len() > NAME_MAX {
                    return None;
                }
                at = behind;
            }
            0xc0.. => {
                let to = usize::from(word(bytes.get(at..at + 2)?, 0) & 0x3fff);
                end.get_or_insert(at + 2);
                if to >= part {
                    return None;
                }
                (at, part) = (to, to);
            }
            _ => return None,
        }
    }
}
