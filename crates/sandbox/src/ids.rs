//! Which users a domain's processes are, inside and outside (user_namespaces(7)).
//!
//! | started by | guest | frontend, driver domain |
//! |---|---|---|
//! | root | every id as it is | 0 inside; outside an id that nobody has, another one each |
//! | a user | 0 inside, the user outside | 0 inside, the user outside |
//!
//! A guest's init and command live in a user namespace nested in the guest's, with the same ids.
//! What is mounted in the outer one is locked for them.
//!
//! A guest's command reads and writes files as whoever started it would. The other two need no
//! file at all, so as root they get ids of their own: then even a process that escaped from all
//! its namespaces could not touch the others. A user has but one id to give; what then keeps the
//! processes apart is that they are in sibling namespaces and cannot be traced.

use std::fmt::Write as _;
use std::fs;
use std::io;

use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

/// The first of the ids given out to frontends and driver domains that root starts. This and the
/// 2²² (the largest process id) above it lie in the range that systemd's allocation of ids
/// declares unused (1879048192 to 2147483647).
const UNUSED_IDS: u32 = 1_879_048_192;
// Above that are the ids that programs take for negative.
const _: () = assert!(UNUSED_IDS + (1 << 22) < 1 << 31);

/// Who writes a keeper's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MapWriter {
    /// The keeper itself: its own id becomes 0.
    Supervisor,
    /// The launcher, which may map ids that are not the keeper's.
    Launcher,
}

/// The content of `/proc/PID/uid_map` and `gid_map`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maps {
    uid: String,
    gid: String,
}

/// Ids that exist in this process's own user namespace: first id, how many.
type Ranges = Vec<(u32, u32)>;

/// Whether this process may give a user namespace other ids than its own.
///
/// # Errors
///
/// The kernel's; none are expected.
pub fn may_map_any() -> io::Result<bool> {
    /// `CAP_SETFCAP`, without which id 0 cannot be mapped to itself.
    const SETFCAP: CapabilitySet = CapabilitySet::from_bits_retain(1 << 31);
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID | SETFCAP;
    let held = rustix::thread::capabilities(None)?.effective;
    Ok(rustix::process::geteuid().is_root() && held.contains(needed))
}

/// Returns `true` if this process is root, and root of a user namespace that has every id as it is: as far
/// as can be seen from here, the computer's own.
///
/// # Errors
///
/// When `/proc` cannot be read.
pub fn is_host_root() -> io::Result<bool> {
    let is_root = rustix::process::geteuid().is_root();
    Ok(is_root && fs::read_to_string("/proc/self/uid_map").map(|map| is_complete(&map))?)
}

/// Returns `true` if a map gives every id as it is.
fn is_complete(map: &str) -> bool {
    let mut columns = map.split_ascii_whitespace();
    let all = ["0", "0", "4294967295"].iter().all(|column| columns.next() == Some(column));
    all && columns.next().is_none()
}

impl Maps {
    /// Every id that exists here, as it is.
    ///
    /// # Errors
    ///
    /// When `/proc` cannot be read.
    pub fn identity() -> io::Result<Maps> {
        Ok(Maps { uid: identity_of(&ranges("uid")?), gid: identity_of(&ranges("gid")?) })
    }

    /// Id 0 alone, which is an unused id outside, different for each process `pid`. `None` where
    /// this user namespace has no such ids.
    ///
    /// # Errors
    ///
    /// When `/proc` cannot be read.
    pub fn single_unused(pid: u32) -> io::Result<Option<Maps>> {
        let Some(outside) = UNUSED_IDS.checked_add(pid) else { return Ok(None) };
        let exists = contains(&ranges("uid")?, outside) && contains(&ranges("gid")?, outside);
        let line = format!("0 {outside} 1\n");
        Ok(exists.then(|| Maps { uid: line.clone(), gid: line }))
    }

    /// Gives these maps to a process that has just entered a new user namespace.
    ///
    /// # Errors
    ///
    /// The kernel's: `EPERM` when this process may not map these ids.
    pub fn write_for(&self, pid: u32) -> io::Result<()> {
        fs::write(format!("/proc/{pid}/uid_map"), &self.uid)?;
        fs::write(format!("/proc/{pid}/gid_map"), &self.gid)
    }
}

/// The ids that this process had before it entered a new user namespace.
#[derive(Clone, Copy, Debug)]
pub struct OwnIds {
    uid: u32,
    gid: u32,
}

impl OwnIds {
    /// To be asked before the user namespace is entered: afterwards they are not to be seen.
    pub fn current() -> OwnIds {
        OwnIds {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }

    /// Makes them 0 in the user namespace that this process has just entered.
    ///
    /// # Errors
    ///
    /// The kernel's: `EPERM` where a policy allows user namespaces, but not their use.
    pub fn map_to_root(self) -> io::Result<()> {
        // Else a group could be dropped that denies access to a file.
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("0 {} 1\n", self.uid))?;
        fs::write("/proc/self/gid_map", format!("0 {} 1\n", self.gid))
    }
}

fn ranges(which: &str) -> io::Result<Ranges> {
    let text = fs::read_to_string(format!("/proc/self/{which}_map"))?;
    parse(&text).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("/proc/self/{which}_map: {text:?}"))
    })
}

/// Reads the first and third column of an id map.
fn parse(map: &str) -> Option<Ranges> {
    map.lines()
        .map(|line| {
            let mut columns = line.split_ascii_whitespace().map(str::parse::<u32>);
            let inside = columns.next()?.ok()?;
            columns.next()?.ok()?;
            let count = columns.next()?.ok()?;
            Some((inside, count))
        })
        .collect()
}

fn identity_of(ranges: &Ranges) -> String {
    ranges.iter().fold(String::new(), |mut map, (first, count)| {
        // Writing to a String cannot fail.
        let _ = writeln!(map, "{first} {first} {count}");
        map
    })
}

fn contains(ranges: &Ranges, id: u32) -> bool {
    ranges.iter().any(|&(first, count)| id >= first && id - first < count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_initial_namespace_has_every_id() {
        let ranges = parse("         0          0 4294967295\n").unwrap();
        assert_eq!(ranges, [(0, u32::MAX)]);
        assert!(contains(&ranges, UNUSED_IDS + (1 << 22)));
        assert_eq!(identity_of(&ranges), "0 0 4294967295\n");
    }

    #[test]
    fn only_a_map_of_every_id_to_itself_is_complete() {
        assert!(is_complete("         0          0 4294967295\n"));
        for map in ["0 1000 1\n", "0 100000 65536\n", "0 0 1\n1 1 4294967294\n", ""] {
            assert!(!is_complete(map), "{map:?}");
        }
    }

    #[test]
    fn a_container_has_those_of_its_map() {
        let ranges = parse("0 1000 1\n1 100000 65536\n").unwrap();
        assert!(contains(&ranges, 0) && contains(&ranges, 65536));
        assert!(!contains(&ranges, 65537) && !contains(&ranges, UNUSED_IDS));
        assert_eq!(identity_of(&ranges), "0 0 1\n1 1 65536\n");
    }

    #[test]
    fn text_that_is_no_map_is_refused() {
        for text in ["0 0\n", "a 0 1\n", "0 0 -1\n", "0 0 4294967296\n"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
