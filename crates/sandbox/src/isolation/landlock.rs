//! Landlock rules (landlock(7)): a second barrier beside namespaces and seccomp.
//!
//! An uplink keeps the host's network, and a daemon keeps files of the host. Landlock denies files
//! and sockets even if another barrier fails. Newer kernels also deny abstract Unix sockets, which
//! belong to a network namespace. All rules are best effort: an older kernel enforces fewer of
//! them.

use std::io;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};

/// Gives up all access to files, permanently. Returns `false` if the kernel has no Landlock.
pub(super) fn no_files() -> io::Result<bool> {
    let abi = ABI::V6;
    let restricted = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(abi)))
        .and_then(Ruleset::create)
        .and_then(|ruleset| ruleset.restrict_self());
    match restricted {
        Ok(status) => Ok(status.ruleset != RulesetStatus::NotEnforced),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Sockets that a daemon may open, if the kernel has Landlock. Abstract Unix sockets and signals to
/// other processes are always denied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sockets {
    /// Permits TCP connections to any host.
    pub connect: bool,
    /// The only TCP port on which the daemon may listen.
    pub listen: Option<u16>,
}

impl Sockets {
    /// No TCP sockets.
    pub const NONE: Sockets = Sockets { connect: false, listen: None };

    /// Enforces the rule permanently for this thread and the threads that it starts.
    pub(super) fn restrict(self) -> io::Result<()> {
        let mut handled: BitFlags<AccessNet> = AccessNet::BindTcp.into();
        if !self.connect {
            handled |= AccessNet::ConnectTcp;
        }
        let ports = self.listen.map(|port| Ok(NetPort::new(port, AccessNet::BindTcp)));
        let restricted = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(handled)
            .and_then(|ruleset| ruleset.scope(Scope::from_all(ABI::V6)))
            .and_then(Ruleset::create)
            .and_then(|ruleset| ruleset.add_rules(ports))
            .and_then(landlock::RulesetCreated::restrict_self);
        restricted.map(drop).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

    use super::*;

    #[test]
    fn socket_that_was_not_requested_is_denied() {
        let name = format!("ringfence-landlock-{}", std::process::id());
        let name = SocketAddr::from_abstract_name(name).unwrap();
        let _named = UnixListener::bind_addr(&name).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let attempt = |sockets: Option<Sockets>| {
            let name = name.clone();
            // The restriction holds for one thread.
            let attempts = std::thread::spawn(move || {
                if let Some(sockets) = sockets {
                    sockets.restrict().unwrap();
                }
                [
                    UnixStream::connect_addr(&name).is_ok(),
                    TcpStream::connect(address).is_ok(),
                    TcpListener::bind("127.0.0.1:0").is_ok(),
                ]
            });
            attempts.join().unwrap()
        };
        assert_eq!(attempt(None), [true; 3]);
        let nowhere = attempt(Some(Sockets::NONE));
        if nowhere == [true; 3] {
            eprintln!("SKIPPED: this kernel's Landlock restricts no sockets (Linux 6.7, 6.12)");
            return;
        }
        assert_eq!(nowhere[1..], [false; 2]);
        let connect = Sockets { connect: true, ..Sockets::NONE };
        assert_eq!(attempt(Some(connect))[1..], [true, false]);
    }
}
