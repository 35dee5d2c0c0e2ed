//! A second lock on files, for who keeps the host's network: the root is empty already, and the list
//! of system calls opens nothing. Landlock (`landlock(7)`) holds should either be got around, and on
//! newer kernels also keeps a process from abstract Unix sockets, which belong to a network namespace.

use std::io;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus, Scope,
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
