//! Presence of a guest in the runtime directory: its socket for clients, and the socket of its switch.
//!
//! A session's directory is removed when the session ends, one in /tmp by a program that cleans up, both by the user. Other
//! commands would then not find the guest, and a second guest would start another switch of the same name. The
//! launcher therefore watches the directory ([`Presence`](super::presence::Presence)). When a name of the guest is gone, it
//! makes the directory and the sockets anew. The first launcher of a switch to do so sends the driver domain its new
//! listening socket.

use std::os::fd::AsFd;
use std::time::Instant;

use super::clients::Clients;
use super::guest_processes::GuestProcesses;
use super::options::SwitchChoice;
use super::presence::LOOKS;
use ringfence_driver::switchboard::ToDriver;
use ringfence_hostnet::runtime_dir::{RuntimeDir, RuntimeDirError};

impl GuestProcesses<'_> {
    /// Begins to watch the directory. Names may have been removed before.
    pub(super) fn watch_presence(&mut self) {
        match self.presence.directory().watch_removals() {
            Ok(watch) => self.presence.watch = Some(watch),
            // Looks at intervals take the place of events.
            Err(error) => {
                self.reporter.step(error);
                self.presence.next_look = Some(Instant::now() + LOOKS);
            }
        }
        self.restore_presence();
    }

    /// Makes directory and sockets anew if an event says that they may be gone.
    pub(super) fn follow_presence(&mut self) {
        if self.presence.may_be_lost() {
            self.restore_presence();
        }
    }

    fn restore_presence(&mut self) {
        if self.is_present() {
            return;
        }
        let path = self.presence.directory().path().display().to_string();
        self.presence.next_look = Some(Instant::now() + LOOKS);
        match self.make_presence() {
            Ok(()) => {
                self.presence.has_complained = false;
                let text = format_args!("{path} or sockets in it were removed, and were made anew");
                self.reporter.summary(text);
            }
            Err(error) if !self.presence.has_complained => {
                self.presence.has_complained = true;
                self.reporter.problem(format_args!(
                    "{path} was removed and cannot be made anew ({error}): `ringfence ps`, `exec` and `stop` do not \
                     find this guest, and new guests do not find its switch. It is tried again every {LOOKS:?}"
                ));
            }
            Err(_) => {}
        }
    }

    /// Returns the name of the switch that new guests may look for.
    fn shared_switch(&self) -> Option<&str> {
        match &self.options.switch {
            SwitchChoice::Shared(name) => Some(name),
            SwitchChoice::Private | SwitchChoice::None => None,
        }
    }

    fn is_present(&self) -> bool {
        let directory = self.presence.directory();
        directory.is_at_its_path()
            && self.clients.as_ref().is_none_or(Clients::is_named)
            && self.shared_switch().is_none_or(|switch| directory.has_switch(switch))
    }

    fn make_presence(&mut self) -> Result<(), RuntimeDirError> {
        if !self.presence.directory().is_at_its_path() {
            let directory = RuntimeDir::open_at(self.presence.directory().path().to_owned())?;
            self.presence.watch = directory.watch_removals().ok();
            self.presence.renewed = Some(directory);
        }
        let directory = self.presence.directory();
        if let Some(switch) = self.shared_switch() {
            let lock = directory.lock()?;
            // Another launcher of the switch may have made it.
            if directory.connect(switch)?.is_none() {
                let (listener, _) = directory.listen(switch, &lock)?;
                let channel = self.driver_channel();
                // If the driver domain is gone, its launcher hears of that soon.
                channel.map(|channel| channel.send_now(&ToDriver::Listen, &[listener.as_fd()]));
            }
        }
        let Some(clients) = &mut self.clients else { return Ok(()) };
        clients.follow(self.presence.directory())
    }
}
