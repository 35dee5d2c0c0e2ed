//! User and group ids of a domain's processes: maps between a user namespace and its parent
//! (user_namespaces(7)).
//!
//! | started by | guest | frontend, uplink, driver domain |
//! |---|---|---|
//! | root | every id maps to itself | 0 inside; outside an unused id, different for each process |
//! | another user | 0 inside, the user outside | 0 inside, the user outside |
//!
//! A guest's init enters a user namespace nested in the guest's, with the same ids. Mounts of the outer
//! namespace are locked there. Unless the command is to be root, init then enters a third one, which maps
//! the ids of an ordinary user to themselves. There the command has the user's own ids, and no
//! capability over the namespaces of the second one:
//!
//! ```text
//! user 1000 ──> 0 in the guest's ──> 0 in the nested one ──> 1000 for init and command
//!               owns the covers       owns the network        owns nothing
//! ```
//!
//! A guest's command accesses files with the rights of the user who started it. The other domains
//! access no files. Under root they get unused ids, so that a process which escapes from its
//! namespaces still has no rights over other processes or files. An ordinary user has only one id.
//! There the processes are separated by sibling namespaces, whose processes cannot trace each
//! other.

use std::fmt::Write as _;
use std::fs;
use std::io;

use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

/// First of the ids for frontends, uplinks and driver domains that root starts. The process id is
/// added to it. All ids from here to 2²² (the largest process id) above lie in the range that
/// systemd's id allocation declares unused (1879048192 to 2147483647).
const UNUSED_IDS: u32 = 1_879_048_192;
// Programs treat ids of 2³¹ and above as negative.
const _: () = assert!(UNUSED_IDS + (1 << 22) < 1 << 31);

/// Process that writes the id maps of a supervisor's user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MapWriter {
    /// The supervisor itself. It can only map its own id, to 0.
    Supervisor,
    /// The launcher, which can map other ids.
    Launcher,
}

/// Contents of `/proc/PID/uid_map` and `/proc/PID/gid_map`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maps {
    uid: String,
    gid: String,
}

/// Id ranges that exist in this process's user namespace: first id and length.
type Ranges = Vec<(u32, u32)>;

/// Returns `true` if this process may map ids other than its own into a user namespace.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn may_map_any() -> io::Result<bool> {
    /// `CAP_SETFCAP`. Without it, id 0 cannot be mapped to itself.
    const SETFCAP: CapabilitySet = CapabilitySet::from_bits_retain(1 << 31);
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID | SETFCAP;
    let held = rustix::thread::capabilities(None)?.effective;
    Ok(rustix::process::geteuid().is_root() && held.contains(needed))
}

/// Returns `true` if this process is root of a user namespace that maps every id to itself. As far
/// as a process can tell, that is the host's own.
///
/// # Errors
///
/// Fails if `/proc` cannot be read.
pub fn is_host_root() -> io::Result<bool> {
    let is_root = rustix::process::geteuid().is_root();
    Ok(is_root && fs::read_to_string("/proc/self/uid_map").map(|map| is_complete(&map))?)
}

/// Returns the user id that `inside` has in the parent of this user namespace. Returns `inside` itself if that is
/// unknown.
pub fn outer_uid(inside: u32) -> u32 {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    outer_of(&map, inside).unwrap_or(inside)
}

/// Returns the id of the parent namespace to which a map maps `inside`.
fn outer_of(map: &str, inside: u32) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut columns = line.split_ascii_whitespace().map(str::parse::<u32>);
        let (first, outer) = (columns.next()?.ok()?, columns.next()?.ok()?);
        let count = columns.next()?.ok()?;
        let offset = inside.checked_sub(first).filter(|offset| *offset < count)?;
        outer.checked_add(offset)
    })
}

/// Returns `true` if a map maps every id to itself.
fn is_complete(map: &str) -> bool {
    let mut columns = map.split_ascii_whitespace();
    let all = ["0", "0", "4294967295"].iter().all(|column| columns.next() == Some(column));
    all && columns.next().is_none()
}

impl Maps {
    /// Builds maps of every id that exists here to itself.
    ///
    /// # Errors
    ///
    /// Fails if `/proc` cannot be read.
    pub fn identity() -> io::Result<Maps> {
        Ok(Maps { uid: identity_of(&ranges("uid")?), gid: identity_of(&ranges("gid")?) })
    }

    /// Builds maps of id 0 alone to an unused id outside, derived from the process id `pid`.
    /// Returns `None` if this user namespace does not contain that id.
    ///
    /// # Errors
    ///
    /// Fails if `/proc` cannot be read.
    pub fn single_unused(pid: u32) -> io::Result<Option<Maps>> {
        let Some(outside) = UNUSED_IDS.checked_add(pid) else { return Ok(None) };
        let exists = contains(&ranges("uid")?, outside) && contains(&ranges("gid")?, outside);
        let line = format!("0 {outside} 1\n");
        Ok(exists.then(|| Maps { uid: line.clone(), gid: line }))
    }

    /// Returns `true` if they map id 0 to itself and no other.
    pub fn have_one_id(&self) -> bool {
        [&self.uid, &self.gid].into_iter().all(|map| map == "0 0 1\n")
    }

    /// Writes these maps for a process that has just entered a new user namespace.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error: `EPERM` if this process may not map these ids.
    pub fn write_for(&self, pid: u32) -> io::Result<()> {
        fs::write(format!("/proc/{pid}/uid_map"), &self.uid)?;
        fs::write(format!("/proc/{pid}/gid_map"), &self.gid)
    }
}

/// User and group id of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnIds {
    uid: u32,
    gid: u32,
}

impl OwnIds {
    /// Reads the ids. Before a user namespace is entered: afterwards they cannot be read.
    pub fn current() -> OwnIds {
        OwnIds {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }

    /// Maps the ids to 0 in the user namespace that this process has just entered.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error: `EPERM` if a policy permits the namespace but not its use.
    pub fn map_to_root(self) -> io::Result<()> {
        self.map_to(OwnIds { uid: 0, gid: 0 })
    }

    /// Maps the ids to `inside` in the user namespace that this process has just entered. `self` are
    /// the ids that it had before.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error: `EPERM` if a policy permits the namespace but not its use.
    pub fn map_to(self, inside: OwnIds) -> io::Result<()> {
        // Required by the kernel: setgroups could drop a group whose membership denies access to a
        // file.
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{} {} 1\n", inside.uid, self.uid))?;
        fs::write("/proc/self/gid_map", format!("{} {} 1\n", inside.gid, self.gid))
    }
}

fn ranges(kind: &str) -> io::Result<Ranges> {
    let text = fs::read_to_string(format!("/proc/self/{kind}_map"))?;
    parse(&text).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("/proc/self/{kind}_map: {text:?}"))
    })
}

/// Parses the first and third column of an id map.
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
    fn initial_namespace_map_contains_every_id() {
        let ranges = parse("         0          0 4294967295\n").unwrap();
        assert_eq!(ranges, [(0, u32::MAX)]);
        assert!(contains(&ranges, UNUSED_IDS + (1 << 22)));
        assert_eq!(identity_of(&ranges), "0 0 4294967295\n");
    }

    #[test]
    fn map_with_missing_or_moved_ids_is_not_complete() {
        assert!(is_complete("         0          0 4294967295\n"));
        for map in ["0 1000 1\n", "0 100000 65536\n", "0 0 1\n1 1 4294967294\n", ""] {
            assert!(!is_complete(map), "{map:?}");
        }
    }

    #[test]
    fn container_map_contains_only_its_ranges() {
        let ranges = parse("0 1000 1\n1 100000 65536\n").unwrap();
        assert!(contains(&ranges, 0) && contains(&ranges, 65536));
        assert!(!contains(&ranges, 65537) && !contains(&ranges, UNUSED_IDS));
        assert_eq!(identity_of(&ranges), "0 0 1\n1 1 65536\n");
        let of = |map: &str| identity_of(&parse(map).unwrap());
        let have_one = |uid: &str, gid: &str| Maps { uid: of(uid), gid: of(gid) }.have_one_id();
        assert!(have_one("0 1000 1\n", "0 1000 1\n"));
        assert!(!have_one("0 1000 1\n1 100000 65536\n", "0 1000 1\n"));
        assert!(!have_one("0 1000 1\n", "0 1000 2\n") && !have_one("1000 0 1\n", "1000 0 1\n"));
    }

    #[test]
    fn id_outside_is_that_of_the_line_with_the_id_inside() {
        let map = "0 1000 1\n1 100000 65536\n";
        assert_eq!((outer_of(map, 0), outer_of(map, 3)), (Some(1000), Some(100_002)));
        assert_eq!((outer_of(map, 65537), outer_of("x", 0)), (None, None));
        assert_eq!(outer_of("1000 0 1\n", 999), None);
    }

    #[test]
    fn malformed_id_map_is_rejected() {
        for text in ["0 0\n", "a 0 1\n", "0 0 -1\n", "0 0 4294967296\n"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
