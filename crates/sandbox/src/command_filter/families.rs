//! Socket families that a command may use.
//!
//! A network namespace separates the sockets of some families only. AF_VSOCK leads to the hypervisor and to other virtual
//! machines from every one of them, past a guest's uplink and its policy. So the command gets the families that
//! it needs and that its namespaces hold, and every other one fails with `EAFNOSUPPORT`, as on a kernel without it.
//!
//! An io_uring opens sockets without a system call that a filter sees, and `socketcall` of 32-bit x86 has the family in
//! memory, which a filter cannot read. Both are denied as long as a family is.

use std::fmt;
use std::str::FromStr;

use super::list::{Answer, Denied};
use super::program::{Action, Condition, Rule};

/// Family, with the names of `socket(2)` and of options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    name: &'static str,
    number: u32,
}

/// Families that a command may always use: the namespaces of a guest hold them.
const HELD: [Family; 5] = [
    // Abstract names belong to the network namespace, paths to the mount namespace.
    Family { name: "unix", number: 1 },
    Family { name: "inet", number: 2 },
    Family { name: "inet6", number: 10 },
    Family { name: "netlink", number: NETLINK },
    // Needs CAP_NET_RAW over the network namespace.
    Family { name: "packet", number: 17 },
];

/// Families that an option allows, in the order of their names.
const ON_REQUEST: [Family; 32] = [
    // The algorithms of the kernel, for every process; a number of vulnerabilities.
    Family { name: "alg", number: 38 },
    Family { name: "appletalk", number: 5 },
    Family { name: "atmpvc", number: 8 },
    Family { name: "atmsvc", number: 20 },
    Family { name: "ax25", number: 3 },
    // Adapters of the host.
    Family { name: "bluetooth", number: 31 },
    Family { name: "caif", number: 37 },
    Family { name: "can", number: 29 },
    Family { name: "ib", number: 27 },
    Family { name: "ieee802154", number: 36 },
    Family { name: "ipx", number: 4 },
    Family { name: "isdn", number: 34 },
    Family { name: "iucv", number: 32 },
    Family { name: "kcm", number: 41 },
    Family { name: "key", number: 15 },
    Family { name: "llc", number: 26 },
    Family { name: "mctp", number: 45 },
    Family { name: "mpls", number: 28 },
    Family { name: "netrom", number: 6 },
    // Readers of the host.
    Family { name: "nfc", number: 39 },
    Family { name: "phonet", number: 35 },
    Family { name: "pppox", number: 24 },
    // Processors of the host, such as a modem.
    Family { name: "qipcrtr", number: 42 },
    Family { name: "rds", number: 21 },
    Family { name: "rose", number: 11 },
    Family { name: "rxrpc", number: 33 },
    Family { name: "smc", number: SMC },
    Family { name: "tipc", number: 30 },
    // The hypervisor, virtual machines on this host, and its other programs.
    Family { name: "vsock", number: 40 },
    Family { name: "wanpipe", number: 25 },
    Family { name: "x25", number: 9 },
    Family { name: "xdp", number: 44 },
];

const NETLINK: u32 = 16;
const SMC: u32 = 43;

/// Protocols of netlink that belong to a network namespace: routes, user sockets, socket diagnosis, IPsec, look-ups of
/// routes, netfilter, events of devices, generic families. Not among them: the audit log (9), process events (11), and
/// InfiniBand (20), whose devices all network namespaces share.
const NETLINK_HELD: [u32; 8] = [0, 2, 4, 6, 10, 12, 15, 16];

/// Protocol of IP sockets that makes them SMC sockets, which use adapters of the host.
const PROTOCOL_SMC: u32 = 256;
/// IPv4 and IPv6, by family.
const IP: [u32; 2] = [2, 10];

/// Operations of `socketcall` that make sockets (`SYS_SOCKET`, `SYS_SOCKETPAIR` in `linux/net.h`).
const SOCKETCALL_MAKES: [u32; 2] = [1, 8];

/// Error of a name that is no family's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no socket family: {names}, or `all`", names = names())]
pub struct UnknownFamily(String);

/// Families that the user allows in addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// One family. `netlink` stands for all its protocols.
    One(Family),
    /// Every family.
    All,
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Allowed::One(family) => family.name,
            Allowed::All => "all",
        })
    }
}

impl FromStr for Allowed {
    type Err = UnknownFamily;

    /// Parses a name as in `vsock` or `AF_VSOCK`.
    fn from_str(text: &str) -> Result<Allowed, UnknownFamily> {
        let name = text.to_ascii_lowercase();
        let name = name.strip_prefix("af_").or(name.strip_prefix("pf_")).unwrap_or(&name);
        if name == "all" {
            return Ok(Allowed::All);
        }
        let found = HELD.iter().chain(&ON_REQUEST).find(|family| family.name == name);
        found.map(|family| Allowed::One(*family)).ok_or_else(|| UnknownFamily(text.to_owned()))
    }
}

/// Returns the names of the families that an option allows.
fn names() -> String {
    let names: Vec<&str> = ON_REQUEST.iter().map(|family| family.name).collect();
    format!("{}, netlink (all its protocols)", names.join(", "))
}

/// Returns the rules of calls that make sockets. None if every family is allowed.
pub(super) fn rules(allowed: &[Allowed]) -> Vec<Denied> {
    if allowed.contains(&Allowed::All) {
        return vec![];
    }
    let sockets = of_sockets(allowed);
    let multiplexer = SOCKETCALL_MAKES.map(|operation| Rule {
        when: vec![Condition::int(0, operation)],
        action: Action::Errno(errno(libc::EAFNOSUPPORT)),
    });
    let mut rules = vec![
        Denied { call: "socket", rules: sockets.clone() },
        Denied { call: "socketpair", rules: sockets },
        Denied { call: "socketcall", rules: multiplexer.into() },
    ];
    rules.extend(super::list::IO_URING.map(|call| Denied::always(call, Answer::Forbidden)));
    rules
}

/// Returns the rules of `socket` and `socketpair`, whose arguments are family, type and protocol.
fn of_sockets(allowed: &[Allowed]) -> Vec<Rule> {
    let rule = |when: &[(u8, u32)], action| Rule {
        when: when.iter().map(|(argument, value)| Condition::int(*argument, *value)).collect(),
        action,
    };
    let is_allowed = |number| {
        let mut ones = allowed.iter();
        ones.any(|allowed| matches!(allowed, Allowed::One(family) if family.number == number))
    };
    let no_protocol = Action::Errno(errno(libc::EPROTONOSUPPORT));
    let mut rules = vec![];
    if !is_allowed(SMC) {
        rules.extend(IP.map(|family| rule(&[(0, family), (2, PROTOCOL_SMC)], no_protocol)));
    }
    let held = HELD.iter().filter(|family| family.number != NETLINK);
    rules.extend(held.map(|family| rule(&[(0, family.number)], Action::Allow)));
    let requested = ON_REQUEST.iter().filter(|family| is_allowed(family.number));
    rules.extend(requested.map(|family| rule(&[(0, family.number)], Action::Allow)));
    if is_allowed(NETLINK) {
        rules.push(rule(&[(0, NETLINK)], Action::Allow));
    } else {
        let held = NETLINK_HELD.map(|protocol| rule(&[(0, NETLINK), (2, protocol)], Action::Allow));
        rules.extend(held);
        rules.push(rule(&[(0, NETLINK)], no_protocol));
    }
    rules.push(rule(&[], Action::Errno(errno(libc::EAFNOSUPPORT))));
    rules
}

/// Converts a constant of the C library, which is below 4096.
pub(super) fn errno(number: i32) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_families_are_parsed_in_each_form() {
        let vsock = Family { name: "vsock", number: 40 };
        for text in ["vsock", "AF_VSOCK", "pf_vsock", "Vsock"] {
            assert_eq!(text.parse(), Ok(Allowed::One(vsock)), "{text}");
        }
        assert_eq!("ALL".parse(), Ok(Allowed::All));
        for text in ["", "vsocks", "af_", "40", "none"] {
            assert!(text.parse::<Allowed>().is_err(), "{text}");
        }
        assert!("x".parse::<Allowed>().unwrap_err().to_string().contains("tipc"));
    }

    #[test]
    fn each_family_of_the_kernel_is_listed_once() {
        let mut numbers: Vec<u32> =
            HELD.iter().chain(&ON_REQUEST).map(|family| family.number).collect();
        numbers.sort_unstable();
        let all = numbers.len();
        numbers.dedup();
        assert_eq!(numbers.len(), all);
        assert!(ON_REQUEST.is_sorted_by(|a, b| a.name < b.name));
        for (name, number) in [
            ("vsock", libc::AF_VSOCK),
            ("alg", libc::AF_ALG),
            ("bluetooth", libc::AF_BLUETOOTH),
            ("tipc", libc::AF_TIPC),
            ("xdp", libc::AF_XDP),
            ("can", libc::AF_CAN),
            ("rds", libc::AF_RDS),
            ("nfc", libc::AF_NFC),
            ("netlink", libc::AF_NETLINK),
        ] {
            let Ok(Allowed::One(family)) = name.parse() else { panic!("{name}") };
            assert_eq!(family.number, number.cast_unsigned(), "{name}");
        }
    }
}
