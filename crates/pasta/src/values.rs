//! Values of the options of pasta and passt: addresses, netmasks, Ethernet addresses, users, pools.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use ringfence_sandbox::cgroup::bytes_of;
use ringfence_uplink_process::link::PoolRule;

/// Value, or the word `none`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OrNone<T> {
    None,
    Some(T),
}

impl<T: FromStr> FromStr for OrNone<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<OrNone<T>, T::Err> {
        if text == "none" { Ok(OrNone::None) } else { text.parse().map(OrNone::Some) }
    }
}

impl<T: Clone> OrNone<T> {
    /// Returns the values that follow the last `none`, and whether there is a `none`.
    pub(crate) fn list(given: &[OrNone<T>]) -> (Vec<T>, bool) {
        let mut values = Vec::new();
        let mut has_none = false;
        for one in given {
            match one {
                OrNone::None => {
                    has_none = true;
                    values.clear();
                }
                OrNone::Some(value) => values.push(value.clone()),
            }
        }
        (values, has_none)
    }
}

/// Address with an optional length of its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressArg {
    pub ip: IpAddr,
    pub prefix: Option<u8>,
}

impl FromStr for AddressArg {
    type Err = String;

    fn from_str(text: &str) -> Result<AddressArg, String> {
        let wrong = || format!("`{text}` is not an address such as 192.0.2.2 or 192.0.2.2/24");
        let (ip, prefix) = match text.split_once('/') {
            Some((ip, prefix)) => (ip, Some(prefix)),
            None => (text, None),
        };
        let ip: IpAddr = ip.parse().map_err(|_| wrong())?;
        let max = if ip.is_ipv4() { 32 } else { 128 };
        let bits = |text: &str| text.parse().ok().filter(|bits| (1..=max).contains(bits));
        let prefix = prefix.map(|prefix| bits(prefix).ok_or_else(wrong)).transpose()?;
        Ok(AddressArg { ip, prefix })
    }
}

/// Length of an IPv4 prefix, written as a number or as a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetmaskArg(pub u8);

impl FromStr for NetmaskArg {
    type Err = String;

    fn from_str(text: &str) -> Result<NetmaskArg, String> {
        let from_mask = |mask: Ipv4Addr| {
            let bits = mask.to_bits();
            (bits.leading_ones() + bits.trailing_zeros() == 32).then_some(bits.leading_ones())
        };
        let length = match text.parse::<Ipv4Addr>() {
            Ok(mask) => from_mask(mask),
            Err(_) => text.parse().ok(),
        };
        let length = length.and_then(|bits| u8::try_from(bits).ok());
        let length = length.filter(|bits| (1..=32).contains(bits));
        length
            .map(NetmaskArg)
            .ok_or_else(|| format!("`{text}` is not a netmask: 1 to 32, or 255.255.255.0"))
    }
}

/// Ethernet address of one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacArg(pub [u8; 6]);

impl FromStr for MacArg {
    type Err = String;

    fn from_str(text: &str) -> Result<MacArg, String> {
        let wrong = || {
            format!(
                "`{text}` is not the Ethernet address of an interface, such as 02:00:00:00:00:01"
            )
        };
        let mut mac = [0; 6];
        let mut parts = text.split([':', '-']);
        for byte in &mut mac {
            let part = parts.next().filter(|part| (1..=2).contains(&part.len()));
            let part = part.filter(|part| part.bytes().all(|b| b.is_ascii_hexdigit()));
            *byte = part.and_then(|part| u8::from_str_radix(part, 16).ok()).ok_or_else(wrong)?;
        }
        let is_of_one = mac != [0; 6] && mac[0] & 1 == 0 && parts.next().is_none();
        is_of_one.then_some(MacArg(mac)).ok_or_else(wrong)
    }
}

/// User and group ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunAs {
    pub uid: u32,
    pub gid: u32,
}

impl RunAs {
    /// Reads the ids of the user `nobody`; the numbers that Linux uses by convention if there is no such user.
    pub(crate) fn nobody() -> RunAs {
        "nobody".parse().unwrap_or(RunAs { uid: 65534, gid: 65534 })
    }
}

impl FromStr for RunAs {
    type Err = String;

    fn from_str(text: &str) -> Result<RunAs, String> {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        let unknown = |kind: &str, name: &str| format!("there is no {kind} `{name}`");
        let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let (uid, own_group) = match user.parse::<u32>() {
            Ok(uid) => (uid, ids_of(&users, user).map_or(uid, |(_, gid)| gid)),
            Err(_) => ids_of(&users, user).ok_or_else(|| unknown("user", user))?,
        };
        let gid = match group.map(|group| (group, group.parse::<u32>())) {
            None => own_group,
            Some((_, Ok(gid))) => gid,
            Some((group, Err(_))) => {
                let groups = fs::read_to_string("/etc/group").unwrap_or_default();
                ids_of(&groups, group).ok_or_else(|| unknown("group", group))?.0
            }
        };
        if uid == 0 {
            return Err(format!("`{text}` is root: give another user"));
        }
        Ok(RunAs { uid, gid })
    }
}

/// Returns the third and fourth field of a line of passwd(5) or group(5) whose name, or third field, is `key`.
fn ids_of(table: &str, key: &str) -> Option<(u32, u32)> {
    table.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, id) = (fields.next()?, fields.nth(1)?);
        let gid = fields.next().and_then(|gid| gid.parse().ok());
        let id: u32 = (name == key || id == key).then(|| id.parse().ok())??;
        Some((id, gid.unwrap_or(id)))
    })
}

/// Memory that `--require-pool` admits: `auto`, or a size such as `64M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolArg(pub PoolRule);

impl FromStr for PoolArg {
    type Err = String;

    fn from_str(text: &str) -> Result<PoolArg, String> {
        if text == "auto" {
            return Ok(PoolArg(PoolRule::Marked));
        }
        match bytes_of(text) {
            Some(bytes @ 1..) => Ok(PoolArg(PoolRule::AtMost(bytes))),
            _ => Err("must be `auto`, or a size such as 64M".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netmask_is_a_number_or_a_mask() {
        let read = |text: &str| text.parse::<NetmaskArg>().ok().map(|mask| mask.0);
        assert_eq!(read("24"), Some(24));
        assert_eq!(read("255.255.240.0"), Some(20));
        for text in ["0", "33", "255.0.255.0", "0.0.0.0", "", "x"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn ethernet_address_of_a_group_is_refused() {
        let read = |text: &str| text.parse::<MacArg>().ok().map(|mac| mac.0);
        assert_eq!(read("9a:55:9a:55:9A:5"), Some([0x9a, 0x55, 0x9a, 0x55, 0x9a, 5]));
        for text in [
            "",
            "9a:55:9a:55:9a",
            "9a:55:9a:55:9a:55:1",
            "01:00:5e:00:00:01",
            "0:0:0:0:0:0",
            "+1:0:0:0:0:1",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn address_may_have_a_prefix_length() {
        let read = |text: &str| text.parse::<AddressArg>().ok().map(|address| address.prefix);
        assert_eq!(read("10.0.2.100"), Some(None));
        assert_eq!(read("10.0.2.100/24"), Some(Some(24)));
        assert_eq!(read("fd00::100/64"), Some(Some(64)));
        for text in ["", "host", "10.0.0.1/0", "10.0.0.1/33", "10.0.0.1/"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn user_is_found_by_name_or_number() {
        let users = "root:x:0:0:root:/root:/bin/sh\nweb:x:33:44::/:/bin/false\nbad\n";
        assert_eq!(ids_of(users, "web"), Some((33, 44)));
        assert_eq!(ids_of(users, "33"), Some((33, 44)));
        assert_eq!(ids_of(users, "none"), None);
        assert_eq!("12:34".parse(), Ok(RunAs { uid: 12, gid: 34 }));
        assert!("0:0".parse::<RunAs>().is_err());
    }

    #[test]
    fn none_discards_values_before_it() {
        let given = [OrNone::Some(1), OrNone::None, OrNone::Some(2)];
        assert_eq!(OrNone::list(&given), (vec![2], true));
    }

    #[test]
    fn pool_is_a_size_or_auto() {
        let pool = |text: &str| text.parse::<PoolArg>().map(|PoolArg(pool)| pool);
        assert_eq!(pool("auto"), Ok(PoolRule::Marked));
        assert_eq!(pool("64M"), Ok(PoolRule::AtMost(64 << 20)));
        for text in ["", "0", "-1", "all", "64Q"] {
            assert!(pool(text).unwrap_err().contains("64M"), "{text}");
        }
    }
}
