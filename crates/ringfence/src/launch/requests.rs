//! Requests of a launcher's clients ([`crate::commands`]).

use ringfence_policy::denials::Denials;
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::cgroup::GuestCgroup;
use ringfence_sys::descriptors::Descriptors;
use rustix::process::Signal;

use super::clients::{ClientEvent, Clients};
use super::filter;
use super::guest_processes::{GuestProcesses, Outcome};
use super::inherited;
use crate::commands::{Counters, Description, LentPages, Reply, Request};
use ringfence_driver::switchboard::{DriverStats, FrontendLevels, ToDriver, ToFrontend};
use ringfence_guest::ToGuest;
use ringfence_uplink_process::egress::live::{self, ClientId};
use ringfence_uplink_process::orders::UplinkOrder;
use ringfence_uplink_process::totals::UplinkTotals;

impl GuestProcesses<'_> {
    /// Handles an event of a client. Fails if the guest cannot be told.
    pub(super) fn serve(&mut self, event: ClientEvent) -> Result<(), Outcome> {
        match event {
            ClientEvent::Request(id, Request::Describe, _) => {
                let description = Box::new(self.description());
                self.reply(id, &Reply::Guest(description));
                Ok(())
            }
            ClientEvent::Request(id, Request::Exec { command, environment }, fds) => {
                self.exec(id, ToGuest::Exec { id, command, environment }, &fds)
            }
            ClientEvent::Request(id, Request::Terminal, _) => {
                self.send_to_guest(&ToGuest::Terminal { id }, &[])
            }
            ClientEvent::Request(id, Request::Signal(number), _) => {
                self.send_to_guest(&ToGuest::ExecSignal { id, number }, &[])
            }
            ClientEvent::Request(_, Request::Stop(number), _) => {
                self.send_to_guest(&ToGuest::Signal(number), &[])
            }
            ClientEvent::Request(id, Request::Policy(request), fds) => {
                self.serve_policy(id, request, fds);
                Ok(())
            }
            ClientEvent::Request(id, Request::Messages { after, wait }, _) => {
                if let Some(clients) = &mut self.clients {
                    clients.read_messages(id, after, wait);
                }
                Ok(())
            }
            ClientEvent::Request(id, Request::Counters, _) => {
                self.ask_for_counters(id);
                Ok(())
            }
            ClientEvent::Request(id, Request::AddPort(text), _) => {
                self.change_ports(id, &text, true)
            }
            ClientEvent::Request(id, Request::RemovePort(text), _) => {
                self.change_ports(id, &text, false)
            }
            ClientEvent::Request(id, Request::UplinkTotals, _) => {
                self.ask_for_totals(id);
                Ok(())
            }
            ClientEvent::Request(id, Request::Levels, _) => {
                self.ask_for_levels(id);
                Ok(())
            }
            ClientEvent::Request(id, Request::Disk(number), _) => {
                self.describe_disk(id, number);
                Ok(())
            }
            ClientEvent::Request(id, Request::Snapshot { number, overlay }, fds) => {
                self.begin_snapshot(id, number, *overlay, fds);
                Ok(())
            }
            ClientEvent::Request(id, Request::ResizeDisk { number, bytes }, _) => {
                self.begin_resize(id, number, bytes);
                Ok(())
            }
            ClientEvent::Request(id, Request::Listening(port), _) => {
                self.send_to_guest(&ToGuest::Listening { id, port }, &[])
            }
            ClientEvent::Gone(id) => {
                let number = Signal::HUP.as_raw();
                self.send_to_guest(&ToGuest::ExecSignal { id, number }, &[])
            }
        }
    }

    fn exec(&mut self, id: ClientId, order: ToGuest, fds: &Descriptors) -> Result<(), Outcome> {
        let stdio: Vec<_> = fds.each().collect();
        if !(3..=4).contains(&stdio.len()) {
            let why = format!("{} descriptors came with the command, not 3 or 4", stdio.len());
            self.reply(id, &Reply::Failed { status: STATUS_FAILED, why });
            return Ok(());
        }
        if inherited::any_leads_to_files(fds) {
            let why = "a standard stream is a directory, which would lead the command to all files";
            self.reply(id, &Reply::Failed { status: STATUS_FAILED, why: why.to_owned() });
            return Ok(());
        }
        self.send_to_guest(&order, &stdio)
    }

    /// Asks the uplink for its totals; [`Clients::tell_totals`] answers.
    fn ask_for_totals(&mut self, id: ClientId) {
        let Some(clients) = &mut self.clients else { return };
        if clients.wait_for_totals(id) {
            return;
        }
        let uplink = self.uplink.channel();
        let asked = uplink.is_some_and(|to| to.send_now(&UplinkOrder::Totals, &[]).is_ok());
        if !asked {
            self.totals_came(None);
        }
    }

    /// Answers the clients that asked for totals.
    pub(super) fn totals_came(&mut self, totals: Option<&UplinkTotals>) {
        if let Some(clients) = &mut self.clients {
            clients.tell_totals(totals);
        }
    }

    /// Asks the frontend for the levels of the memory that it lends; [`Clients::tell_levels`] answers.
    fn ask_for_levels(&mut self, id: ClientId) {
        let Some(clients) = &mut self.clients else { return };
        if clients.wait_for_levels(id) {
            return;
        }
        let frontend = self.frontend.channel();
        let asked = frontend.is_some_and(|to| to.send_now(&ToFrontend::Levels, &[]).is_ok());
        if !asked {
            self.levels_came(FrontendLevels::default());
        }
    }

    /// Answers the clients that asked for the levels of lent memory.
    pub(super) fn levels_came(&mut self, levels: FrontendLevels) {
        if let Some(clients) = &mut self.clients {
            clients.tell_levels(levels);
        }
    }

    /// Writes the last records, and the totals if each step is reported.
    pub(super) fn finish_records(&mut self) {
        let Some((uplink, channel)) = self.uplink.with_channel() else { return };
        let totals = uplink.egress.finish(channel, self.reporter.is_verbose());
        let others = uplink.egress.denials().map_or(0, Denials::unannounced);
        self.report_denials();
        if others > 0 {
            let name = self.host_name();
            self.reporter.summary(format_args!("guest {name}: {others} other denials"));
        }
        if let Some(totals) = totals.filter(|_| self.reporter.is_verbose()) {
            self.reporter.step(format_args!("egress: {totals}"));
        }
    }

    /// Asks the driver domain for its counters, or answers at once if there is none.
    /// [`GuestProcesses::counters_are_there`] answers otherwise.
    fn ask_for_counters(&mut self, id: ClientId) {
        match self.driver_channel().map(|channel| channel.send_now(&ToDriver::GuestStats, &[])) {
            None => self.reply(id, &Reply::Counters(Box::default())),
            Some(Ok(())) => self.clients.iter_mut().for_each(|clients| clients.counters.push(id)),
            Some(Err(error)) => {
                let why = format!("the driver domain: {error}");
                self.reply(id, &Reply::Failed { status: STATUS_FAILED, why });
            }
        }
    }

    /// Answers the clients that wait for counters with those of this guest.
    pub(super) fn counters_are_there(&mut self, stats: DriverStats) {
        let DriverStats { path, ports, disks, levels, rules, .. } = stats;
        let counters = Counters { ports, disks, rules, levels, driver: path };
        let reply = Reply::Counters(Box::new(counters));
        let waiting =
            self.clients.iter_mut().flat_map(|clients| std::mem::take(&mut clients.counters));
        for id in waiting.collect::<Vec<_>>() {
            self.reply(id, &reply);
        }
    }

    /// Answers a client if it is still there.
    pub(super) fn reply(&mut self, to: ClientId, reply: &Reply) {
        if let Some(clients) = &mut self.clients {
            clients.reply(to, reply);
        }
    }

    /// Answers a client if it is still there, and passes descriptors to it.
    pub(super) fn reply_with(&mut self, to: ClientId, reply: &Reply, fds: &Descriptors) {
        if let Some(clients) = &mut self.clients {
            clients.reply_with(to, reply, fds);
        }
    }

    fn command_words(&self) -> Vec<String> {
        let words = self.guest.state().map_or(&[][..], |guest| &guest.command);
        words.iter().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    fn description(&self) -> Description {
        let options = self.options;
        let texts = |addresses: &[ringfence_hostnet::address::Address]| {
            addresses.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let cgroup = self.cgroup.get();
        let huge_pages = self.frontend.state().is_some_and(|frontend| frontend.huge_pages);
        Description {
            name: self.host_name(),
            switch: self.switch().map(str::to_owned),
            command: self.command_words(),
            addresses: self.attached().map_or_else(Vec::new, |a| texts(&a.addresses)),
            uplink: self.uplink().map_or_else(Vec::new, |uplink| texts(uplink.addresses())),
            ports: self.uplink().map_or_else(Vec::new, |uplink| uplink.ports.texts()),
            disks: self.disks.texts(),
            pages: if huge_pages { LentPages::Huge } else { LentPages::Small },
            filter: filter::describe(&options.filter),
            policy: self.uplink().and_then(|uplink| live::describe(uplink.egress.policy()?)),
            since: self.clients.as_ref().map_or(0, Clients::since),
            cgroup: cgroup.and_then(|own| Some(own.path()?.to_string_lossy().into_owned())),
            limits: options.limits,
            usage: cgroup.map(GuestCgroup::usage).unwrap_or_default(),
        }
    }
}
