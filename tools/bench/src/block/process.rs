//! Processes of a disk benchmark, as the parent starts and commands them.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::owned_child::OwnedChild;
use ringfence_sandbox::spawn::THIS_PROGRAM;

use super::orders::{DiskAnswer, DiskCommand, DiskSetup, GuestSetup, Worked};
use crate::usage::Usage;

/// Time limit for an answer, in addition to the time that the command takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Makes all guests work for this time.
pub(crate) fn work(guests: &[DiskDomain], length: Duration) -> anyhow::Result<Vec<Worked>> {
    for guest in guests {
        guest.tell(DiskCommand::Work(length))?;
    }
    let hear = |guest: &DiskDomain| match guest.hear()? {
        DiskAnswer::Worked(worked) => Ok(worked),
        other => bail!("a guest said {other:?}"),
    };
    guests.iter().map(hear).collect()
}

/// Domain process, ended on drop.
pub(crate) struct DiskDomain {
    name: &'static str,
    child: OwnedChild,
    channel: Channel,
}

impl DiskDomain {
    pub(super) fn start(
        name: &'static str,
        setup: &DiskSetup,
        hub: OwnedFd,
    ) -> anyhow::Result<DiskDomain> {
        let (channel, theirs) = Channel::pair().context("a channel")?;
        let child = Command::new(THIS_PROGRAM)
            .arg0("ringfence")
            .args(["internal", "bench-block"])
            .stdin(Stdio::from(theirs.into_fd()))
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("starting the {name}"))?;
        let domain = DiskDomain { name, child: OwnedChild(child), channel };
        domain.channel.send(setup, &[hub.as_fd()])?;
        Ok(domain)
    }

    /// Starts a guest for an existing device. Returns once its disk holds the data to be read.
    pub(crate) fn guest(setup: GuestSetup, hub: OwnedFd) -> anyhow::Result<DiskDomain> {
        let guest = DiskDomain::start("guest", &DiskSetup::Guest(setup), hub)?;
        match guest.hear()? {
            DiskAnswer::Ready => Ok(guest),
            other => bail!("the guest said {other:?}"),
        }
    }

    /// Returns the process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn tell(&self, order: DiskCommand) -> anyhow::Result<()> {
        self.channel.send(&order, &[]).with_context(|| format!("telling the {}", self.name))
    }

    pub(super) fn hear(&self) -> anyhow::Result<DiskAnswer> {
        let name = self.name;
        match self.channel.receive_within::<DiskAnswer>(PATIENCE) {
            Ok((DiskAnswer::Failed(why), _)) => bail!("{name}: {why}"),
            Ok((answer, _)) => Ok(answer),
            Err(ChannelError::Closed) => bail!("the {name} is gone (process {})", self.child.id()),
            Err(error) => Err(error).with_context(|| format!("waiting for the {name}")),
        }
    }

    pub(super) fn usage(&self) -> anyhow::Result<Usage> {
        self.tell(DiskCommand::Usage)?;
        match self.hear()? {
            DiskAnswer::Usage(usage) => Ok(usage),
            other => bail!("the {} said {other:?}", self.name),
        }
    }
}
