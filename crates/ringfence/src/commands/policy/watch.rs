//! `ringfence policy watch`: the verdicts of the egress policy of a running guest.

use std::io::Write;

use anyhow::bail;
use ringfence_sandbox::ChannelError;

use crate::commands::{Reply, Request, find};
use ringfence_hostnet::out::Out;

/// Prints verdicts until the guest ends.
///
/// # Errors
///
/// Returns the reason for which there are none, or the error of the output.
pub(super) fn print(guest: &str) -> anyhow::Result<()> {
    let channel = find::one(guest)?.channel;
    channel.send(&Request::Watch, &[])?;
    loop {
        match channel.receive::<Reply>() {
            Ok((Reply::Verdicts(lines), _)) => {
                Out.write_all(lines.as_bytes())?;
                Out.flush()?;
            }
            Ok((Reply::Failed { why, .. }, _)) => bail!("{guest}: {why}"),
            Ok(_) => bail!("{guest} is of another version of Ringfence"),
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
