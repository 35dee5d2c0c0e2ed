//! A second lock on files, for who keeps the host's network: the root is empty already, and the list
//! of system calls opens nothing. Landlock (`landlock(7)`) holds should either be got around, and on
//! newer kernels also keeps a process from abstract Unix sockets, which belong to a network namespace.

use std::io;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};

/// Gives up every right to files, for good. `false` where this kernel has no Landlock.
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

/// Sockets that a daemon may use besides those that it has, as far as the kernel has Landlock. Abstract Unix
/// sockets and signals to other processes are always denied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sockets {
    /// TCP connections to any host.
    pub connect: bool,
    /// The one TCP port at which connections may be awaited.
    pub listen: Option<u16>,
}

impl Sockets {
    /// No TCP at all.
    pub const NONE: Sockets = Sockets { connect: false, listen: None };

    /// Puts this in force, for good, for this thread and those that it starts.
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
    fn sockets_that_were_not_asked_for_are_denied() {
        let name = format!("ringfence-landlock-{}", std::process::id());
        let name = SocketAddr::from_abstract_name(name).unwrap();
        let _named = UnixListener::bind_addr(&name).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let attempt = |sockets: Option<Sockets>| {
            let name = name.clone();
            // The restriction is that of a thread.
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
