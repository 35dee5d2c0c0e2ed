//! `ringfence policy watch`: the verdicts of the egress policy of a running guest.

use std::io::Write;

use anyhow::bail;
use ringfence_sandbox::ChannelError;

use super::holder::{NoReply, PolicyHolder};
use ringfence_hostnet::out::Out;
use ringfence_uplink_process::egress::live::{PolicyReply, PolicyRequest};

/// Prints verdicts until the guest ends.
///
/// # Errors
///
/// Returns the reason for which there are none, or the error of the output.
pub(super) fn print(guest: &str) -> anyhow::Result<()> {
    let holder = PolicyHolder::find(guest)?;
    holder.send(PolicyRequest::Watch, &[])?;
    loop {
        match holder.receive(None) {
            Ok(PolicyReply::Verdicts(lines)) => {
                Out.write_all(lines.as_bytes())?;
                Out.flush()?;
            }
            Err(NoReply::Refused(why)) => bail!("{guest}: {why}"),
            Ok(_) => bail!("{guest} is of another version of Ringfence"),
            Err(NoReply::Channel(ChannelError::Closed)) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
