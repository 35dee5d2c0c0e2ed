//! Changes of a guest's published ports by clients (`ringfence port`), and sockets of the guest's network for relays.

use ringfence_sandbox::STATUS_FAILED;
use ringfence_sys::descriptors::Descriptors;

use super::guest_processes::{GuestProcesses, Outcome};
use super::published_ports::{Changed, listen};
use crate::commands::Reply;
use ringfence_guest::ToGuest;
use ringfence_uplink_process::egress::live::ClientId;
use ringfence_uplink_process::forward::ForwardSpec;
use ringfence_uplink_process::forwarded_ports;

impl GuestProcesses<'_> {
    /// Carries out a client's change of ports. [`GuestProcesses::port_is_changed`] answers later.
    pub(super) fn change_ports(
        &mut self,
        client: ClientId,
        text: &str,
        is_new: bool,
    ) -> Result<(), Outcome> {
        match self.try_change_ports(client, text, is_new) {
            Ok(changed) => self.reply_changed(changed),
            Err(why) => self.reply_changed(Some((client, Err(why)))),
        }
        let needs_relays =
            self.uplink().is_some_and(|uplink| uplink.ports.needs_relays_for_change());
        if needs_relays { self.ask_for_sockets() } else { Ok(()) }
    }

    fn try_change_ports(
        &mut self,
        client: ClientId,
        text: &str,
        is_new: bool,
    ) -> Result<Option<Changed>, String> {
        let spec: ForwardSpec = text.parse().map_err(|error| format!("{text}: {error}"))?;
        let (options, reporter) = (self.options, self.reporter);
        let (uplink, channel) = self.uplink.with_channel().ok_or("it has no uplink")?;
        if is_new {
            let defaults = &options.publish_default;
            let made = listen(&spec, uplink.families(), defaults, reporter);
            let made = made.map_err(|error| ringfence_hostnet::causes::causes(&error))?;
            uplink.ports.add(client, &spec, made)?;
        } else {
            uplink.ports.remove(client, &spec)?;
        }
        Ok(uplink.ports.advance(channel))
    }

    /// Handles the uplink's answer to an order about a port.
    pub(super) fn port_is_changed(&mut self, id: u32, error: Option<String>) {
        let running = self.uplink.with_channel();
        let changed =
            running.and_then(|(uplink, channel)| uplink.ports.answered(channel, id, error));
        self.reply_changed(changed);
    }

    fn reply_changed(&mut self, changed: Option<Changed>) {
        let Some((client, result)) = changed else { return };
        let failed = |why| Reply::Failed { status: STATUS_FAILED, why };
        self.reply(client, &result.map_or_else(failed, |()| Reply::PortsChanged));
    }

    /// Asks the guest's init for sockets of its network, unless some are on their way.
    pub(super) fn ask_for_sockets(&mut self) -> Result<(), Outcome> {
        let Some((uplink, _)) = self.uplink.with_channel() else { return Ok(()) };
        uplink.ports.has_relays = true;
        if std::mem::replace(&mut uplink.ports.awaits_sockets, true) {
            return Ok(());
        }
        self.send_to_guest(&ToGuest::Sockets, &[])
    }

    /// Passes sockets of the guest's network to the uplink. Unexpected ones are closed.
    pub(super) fn pass_sockets(&mut self, fds: Descriptors) {
        let Some((uplink, channel)) = self.uplink.with_channel() else { return };
        if std::mem::take(&mut uplink.ports.awaits_sockets) {
            // An uplink that is gone is reported soon, with the reason.
            let _ = forwarded_ports::send_sockets(channel, &fds.each().collect::<Vec<_>>());
        }
        // Connections that come fast need several such messages in a moment.
        fds.close_internet_sockets();
    }
}
