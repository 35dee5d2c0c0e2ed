//! Lines that `ringfence run` prints when a guest starts, and the names of guest and switch in them.

use super::guest_processes::GuestProcesses;
use super::{INTERFACE, SwitchChoice, list};

impl GuestProcesses<'_> {
    /// Returns the name of the guest's switch, if it is on one.
    pub(super) fn switch(&self) -> Option<&str> {
        self.options.has_switch().then(|| self.driver_name())
    }

    /// Returns the guest's host name.
    pub(super) fn host_name(&self) -> String {
        let number = match (&self.options.switch, self.attached()) {
            (SwitchChoice::Shared(_), Some(attached)) => attached.domain.to_string(),
            // Unique in the PID namespace.
            _ => format!("-{}", std::process::id()),
        };
        self.options.name.clone().unwrap_or_else(|| format!("guest{number}"))
    }

    /// Prints the networks of the guest.
    pub(super) fn announce(&self) {
        let options = self.options;
        let name = self.host_name();
        if self.attached().is_some() {
            self.reporter.step("frontend and backend are connected");
        }
        if let (Some(attached), Some(switch)) = (self.attached(), self.switch()) {
            let company = match options.switch {
                SwitchChoice::Private => "alone (see --switch)",
                _ => "with all guests that name it",
            };
            self.reporter.summary(format_args!("{name} is on switch `{switch}`, {company}"));
            let (addresses, mtu) = (list(&attached.addresses), options.switch_mtu());
            let line = format!("{INTERFACE}: {addresses}, MTU {mtu}, mode {}", options.mode);
            self.reporter.summary_in_lines(&line);
        }
        if let Some(uplink) = self.uplink() {
            self.reporter.summary(format_args!("{name} is on the host's network"));
            self.reporter.summary_in_lines(&uplink.to_string());
        }
        if self.switch().is_none() && self.uplink().is_none() {
            self.reporter.summary(format_args!("{name} has no network but its own loopback"));
        }
    }
}
