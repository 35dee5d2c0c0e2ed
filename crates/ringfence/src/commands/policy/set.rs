//! `ringfence policy set`: replaces the egress policy of a running guest.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use ringfence_policy::{Policy, PolicySource};

use super::holder::{NoReply, PolicyHolder};
use ringfence_uplink_process::egress::live::{PolicyReply, PolicyRequest};
use ringfence_uplink_process::egress::{self, document};

/// Time limit for the uplink to apply the policy.
const APPLIED: Duration = Duration::from_secs(10);

/// Replaces the policy of a guest by that of a file. Returns the number of its rules.
///
/// # Errors
///
/// Returns the first error of the file, or the reason for which the guest keeps its policy.
pub(super) fn set(guest: &str, file: &Path) -> anyhow::Result<usize> {
    let source = read(file)?;
    let rules = Policy::new(source.clone())?.len();
    let holder = PolicyHolder::find(guest)?;
    holder.send(PolicyRequest::Set, &[document::write(&source)?.as_fd()])?;
    match holder.receive(Some(APPLIED)) {
        Ok(PolicyReply::Set) => Ok(rules),
        Err(NoReply::Refused(why)) => bail!("{guest} keeps its policy: {why}"),
        Err(error) => Err(error.into()),
        Ok(_) => bail!("{guest} is of another version of Ringfence"),
    }
}

/// Reads a policy file that has a rule, or says that it allows everything.
///
/// # Errors
///
/// Returns the first error of the file.
pub(super) fn read(file: &Path) -> anyhow::Result<PolicySource> {
    let source = egress::read(file)?;
    if source.is_empty() && source.default.is_none() {
        bail!(
            "{} has no rule, so it would allow everything: say so with `default = \"allow\"`",
            file.display()
        );
    }
    Ok(source)
}
