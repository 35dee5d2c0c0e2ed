//! Process that holds the egress policy of a guest: the launcher of `run`, or the session of `pasta`, `passt` or `slirp4netns`.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use anyhow::bail;
use ringfence_pasta::live_policy::{SessionReply, SessionRequest};
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_uplink_process::egress::live::{PolicyReply, PolicyRequest};

use crate::commands::{Reply, Request, find};

/// Connection to the process that holds a policy.
pub(super) enum PolicyHolder {
    Launcher(Channel),
    Session(Channel),
}

/// Reasons for which there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoReply {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("{0}")]
    Refused(String),
}

impl PolicyHolder {
    /// Finds the holder by the name of its guest, or by its process number.
    ///
    /// # Errors
    ///
    /// Returns the reason for which there is none, or more than one.
    pub(super) fn find(wanted: &str) -> anyhow::Result<PolicyHolder> {
        let session = find::session(wanted)?;
        match (session, find::one(wanted)) {
            (None, guest) => Ok(PolicyHolder::Launcher(guest?.channel)),
            (Some(session), Err(_)) => Ok(PolicyHolder::Session(session.channel)),
            (Some(session), Ok(guest)) => bail!(
                "a guest of `run` and one of `{}` are called `{wanted}`: name one by its PID: {}, {}",
                session.guest.program,
                guest.pid,
                session.pid
            ),
        }
    }

    /// Sends a request with its descriptors, and waits for no reply.
    pub(super) fn send(
        &self,
        request: PolicyRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ChannelError> {
        match self {
            PolicyHolder::Launcher(channel) => channel.send(&Request::Policy(request), fds),
            PolicyHolder::Session(channel) => channel.send(&SessionRequest::Policy(request), fds),
        }
    }

    /// Waits for a reply, for a limited time if there is a limit.
    pub(super) fn receive(&self, within: Option<Duration>) -> Result<PolicyReply, NoReply> {
        let refused = match self {
            PolicyHolder::Launcher(channel) => match receive(channel, within)? {
                Reply::Policy(PolicyReply::Failed(why)) | Reply::Failed { why, .. } => why,
                Reply::Policy(reply) => return Ok(reply),
                _ => "it is of another version of Ringfence".to_owned(),
            },
            PolicyHolder::Session(channel) => match receive(channel, within)? {
                SessionReply::Policy(PolicyReply::Failed(why)) => why,
                SessionReply::Policy(reply) => return Ok(reply),
                SessionReply::Session(_) => "it is of another version of Ringfence".to_owned(),
            },
        };
        Err(NoReply::Refused(refused))
    }
}

fn receive<T: serde::de::DeserializeOwned>(
    channel: &Channel,
    within: Option<Duration>,
) -> Result<T, ChannelError> {
    let received = match within {
        Some(within) => channel.receive_within(within),
        None => channel.receive(),
    };
    received.map(|(reply, _)| reply)
}
