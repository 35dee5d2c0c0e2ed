//! Network card of a virtual machine on a switch: the session attaches a guest to the switch's driver domain, as the
//! launcher of `run` does, and its card process is that guest's frontend.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence_access::Mode;
use ringfence_driver::switchboard::{
    AttachRequest, CardEnd, FromDriver, FromFrontend, FrontendConfig, VERSION,
};
use ringfence_guest::names::store::StoreNames;
use ringfence_hostnet::address::list;
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_hostnet::text::printable;
use ringfence_net::features::OffloadKeys;
use ringfence_net::staging::TxStaging;
use ringfence_net::vif::toolstack::mac_text;
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::spawn::{DomainProcess, Event};

use super::{CardSession, NetArgs};
use crate::launch::SwitchChoice;
use crate::launch::rendezvous::{self, Attachment, RendezvousError};
use crate::launch::report::{Loudness, Reporter};
use crate::vhost_user::common::{LISTEN_TIMEOUT, say};
use crate::vhost_user::session::{Outcome, SessionPart, exit_status};

/// Access mode of the backend: the pages of the card's process stay mapped.
const MODE: Mode = Mode::Staging;

/// Serves a card on the switch of this name.
pub(super) fn serve(args: &NetArgs, name: &str) -> anyhow::Result<u8> {
    let CardSession { mut session, listener, _file } = CardSession::new(args)?;
    let directory = RuntimeDir::open()?;
    let reporter = Reporter::new(if args.verbose { Loudness::Verbose } else { Loudness::Normal });
    let choice = SwitchChoice::Shared(name.to_owned());
    let config = args.card(CardEnd::Switch(frontend(args)));
    loop {
        let attachment = attach(&directory, &choice, &request(args), reporter)?;
        let Attachment { switch, attached, driver_channel, frontend_hub, names, driver } =
            attachment;
        if let Some(name) = &args.name {
            let addresses: Vec<_> = attached.addresses.iter().map(|each| each.ip()).collect();
            StoreNames::open(names)
                .and_then(|mut names| names.announce(name, &addresses))
                .with_context(|| format!("--name {name}"))?;
        }
        let fds = [listener.as_fd(), frontend_hub.as_fd()];
        let domain = session.start::<FromFrontend>(&config, &fds)?;
        // From here on only the card's process holds it, so that it closes when that process ends.
        drop(frontend_hub);
        say(format_args!(
            "{} leads to switch `{switch}`: mac={}, {}",
            args.socket.display(),
            mac_text(attached.mac),
            list(&attached.addresses)
        ));
        let mut connection = SwitchConnection { switch, channel: driver_channel, driver };
        let outcome = session.wait::<FromFrontend>(&domain, &mut connection);
        // The driver domain detaches the guest before it loses the frontend.
        drop(connection);
        drop(domain);
        match outcome? {
            Outcome::Signal(number) => return Ok(exit_status(number)),
            Outcome::Truncated => session.prepare_restart(),
        }
    }
}

/// Attaches the machine. The switch keeps the addresses of a session that was killed for a moment.
fn attach(
    directory: &RuntimeDir,
    choice: &SwitchChoice,
    request: &AttachRequest,
    reporter: Reporter,
) -> Result<Attachment, RendezvousError> {
    let until = Instant::now() + LISTEN_TIMEOUT;
    loop {
        match rendezvous::attach(directory, choice, 0, request, reporter) {
            Err(RendezvousError::Refused { .. }) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            attached => return attached,
        }
    }
}

/// Returns the configuration of the vif's frontend. One thread moves the frames, so the vif has one queue.
fn frontend(args: &NetArgs) -> FrontendConfig {
    FrontendConfig {
        mtu: args.switch_mtu(),
        offloads: 0,
        staging: TxStaging::Full.to_string(),
        windows: false,
        strict_revocation: false,
        queues: 1,
        tap_queues: 1,
        takes: OffloadKeys::ALL.to_string(),
        disks: Vec::new(),
    }
}

fn request(args: &NetArgs) -> AttachRequest {
    AttachRequest {
        version: VERSION.to_owned(),
        name: args.name.clone(),
        mac: Some(args.mac.0),
        addresses: args.addresses.clone(),
        avoid: Vec::new(),
        mtu: args.switch_mtu(),
        mode: MODE.to_string(),
        queues: 1,
        offloads: OffloadKeys::ALL.to_string(),
        coalesce: true,
        forwarding: false,
        advertise: false,
        host_leg: false,
        interface: true,
    }
}

/// Connection to the driver domain of a switch.
struct SwitchConnection {
    switch: String,
    /// Channel to the driver domain, which detaches the guest when it closes.
    channel: Channel,
    /// Driver domain, if this session started it. It stays while other guests are on its switch.
    driver: Option<DomainProcess>,
}

impl SessionPart<FromFrontend> for SwitchConnection {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let events = self.driver.as_ref().map(DomainProcess::events);
        [Some(self.channel.as_fd()), events].into_iter().flatten().collect()
    }

    fn serve(&mut self, _: &Channel) -> anyhow::Result<()> {
        while let Some(event) = self.driver.as_ref().and_then(DomainProcess::next_event) {
            match event {
                Event::Stderr(text) => {
                    text.lines().for_each(|line| say(format_args!("switch: {}", printable(line))));
                }
                // The channel reports the end.
                Event::Ended(_) => self.driver = None,
            }
        }
        let switch = &self.switch;
        match self.channel.try_receive::<FromDriver>() {
            Ok(None) => Ok(()),
            Ok(Some((FromDriver::DeviceClosed(why), _))) => {
                bail!("switch `{switch}` closed the card: {}", printable(&why))
            }
            Ok(Some((FromDriver::Bye(why), _))) => {
                bail!("switch `{switch}` ends: {}", printable(&why))
            }
            Ok(Some(_)) => Ok(()),
            Err(_) => bail!("switch `{switch}` is gone: its driver domain has ended"),
        }
    }
}
