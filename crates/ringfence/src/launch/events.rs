//! Events of a guest's processes, and the one table of their meanings.
//!
//! [`GuestProcesses::handle`] is the table: each row is an event, and says what it means while the processes start
//! (`Starting`), while the command runs (`Running`), or in both phases. A row that returns an [`Outcome`] ends the
//! guest. The steps of a start are events that `starting` waits for; every other event of a start comes here.

use rustix::process::Signal;

use super::clients::ClientEvent;
use super::guest_processes::{GuestProcesses, Outcome};
use crate::commands::Reply;
use ringfence_driver::switchboard::{FromDriver, FromFrontend};
use ringfence_guest::FromGuest;
use ringfence_hostnet::text::printable;
use ringfence_sandbox::signals::ReceivedSignal;
use ringfence_sandbox::spawn::Ended;
use ringfence_sandbox::{Ending, signals};
use ringfence_sys::descriptors::Descriptors;
use ringfence_uplink_process::FromUplink;

/// Events of a guest's processes.
pub(super) enum ProcessEvent {
    Signal(ReceivedSignal),
    Guest(FromGuest, Descriptors),
    GuestGone(Ended),
    Frontend(FromFrontend),
    FrontendGone(Ended),
    Uplink(FromUplink),
    UplinkGone(Ended),
    Driver(FromDriver),
    DriverGone,
    Client(ClientEvent),
    Late,
}

#[derive(Clone, Copy)]
pub(super) enum GuestPhase {
    Starting,
    /// The command runs.
    Running,
}

impl GuestProcesses<'_> {
    /// Handles an event by the table of meanings. An error is the end of the guest.
    pub(super) fn handle(&mut self, phase: GuestPhase, event: ProcessEvent) -> Result<(), Outcome> {
        use GuestPhase::{Running, Starting};
        use ProcessEvent::{Client, Driver, Frontend, Guest, Late, Uplink};
        match (event, phase) {
            (ProcessEvent::Signal(arrived), Starting) => end_start(&arrived)?,
            (ProcessEvent::Signal(arrived), Running) => self.pass_signal(arrived)?,

            (Guest(FromGuest::Running, _), Running) => self.reporter.step("the command runs"),
            (Guest(report, fds), Running) if report.is_for_client() => {
                self.answer_client(report, &fds);
            }
            (Guest(FromGuest::Stopped { signal, number }, _), Running) => {
                self.with_terminal(|terminal, send| terminal.command_stopped(signal, number, send));
            }
            (Guest(FromGuest::Sockets, fds), Running) => self.pass_sockets(fds),
            (Guest(FromGuest::Ended(ending), _), _) => return Err(self.command_ended(ending)),
            (Guest(FromGuest::Failed { status, why }, _), _) => {
                return Err(self.init_failed(status, why));
            }
            (ProcessEvent::GuestGone(ended), _) => {
                return Err(self.gone("the guest's init", &ended));
            }

            (Frontend(FromFrontend::Levels(levels)), Running) => self.levels_came(levels),
            (Frontend(FromFrontend::HasSize { disk }), Running) => self.disk_has_size(disk),
            (Frontend(FromFrontend::Up { .. }), _) => {
                self.reporter.step("the guest's network is up");
            }
            (Frontend(FromFrontend::Down(why)), _) => {
                self.report_problem("the guest's network is down", &why)
            }
            (Frontend(FromFrontend::Failed(why)), _) => {
                return Err(self.unless_driver_gone(failed("the frontend", &why)));
            }
            (ProcessEvent::FrontendGone(ended), _) => {
                return Err(self.unless_driver_gone(self.gone("the frontend", &ended)));
            }

            (Uplink(FromUplink::Sockets), Running) => self.ask_for_sockets()?,
            (Uplink(FromUplink::Port { id, error }), Running) => self.port_is_changed(id, error),
            (Uplink(FromUplink::Policy { error }), Running) => self.policy_is_set(error),
            (Uplink(FromUplink::Totals(totals)), Running) => self.totals_came(Some(&totals)),
            (Uplink(FromUplink::Question(about)), Running) => self.ask(about),
            (Uplink(FromUplink::QuestionOver(number)), Running) => self.end_question(number),
            (Uplink(FromUplink::Failed(why)), _) => return Err(failed("the uplink", &why)),
            (ProcessEvent::UplinkGone(ended), _) => return Err(self.gone("the uplink", &ended)),

            (Driver(FromDriver::Stats(stats)), Running) => self.counters_are_there(*stats),
            (Driver(FromDriver::DiskChanged { handle, problem }), Running) => {
                self.disk_is_changed(handle, problem);
            }
            (Driver(FromDriver::DeviceClosed(why)), _) => {
                self.report_problem(
                    "the driver domain closed this guest's network interface",
                    &why,
                );
            }
            (Driver(FromDriver::DiskClosed { handle, why }), _) => {
                let what = format!("the driver domain closed this guest's disk {handle}");
                self.report_problem(&what, &why);
            }
            (ProcessEvent::DriverGone, _) => return Err(self.driver_gone()),

            (Client(event), Running) => self.serve(event)?,

            // Steps of a start that is over, and reports in another phase, change nothing.
            (Guest(..) | Frontend(_) | Uplink(_) | Driver(_) | Client(_) | Late, _) => {}
        }
        Ok(())
    }

    /// Answers the client whose order to the guest this report is about.
    fn answer_client(&mut self, report: FromGuest, fds: &Descriptors) {
        match report {
            FromGuest::ExecEnded { id, ending } => self.reply(id, &Reply::Ended(ending)),
            FromGuest::ExecFailed { id, status, why } => {
                self.reply(id, &Reply::Failed { status, why });
            }
            FromGuest::Listening { id, ports } => self.reply(id, &Reply::Listening(ports)),
            FromGuest::Terminal { id } => self.reply_with(id, &Reply::Terminal, fds),
            _ => {}
        }
    }

    /// Passes a signal on to the command, or handles one of job control.
    fn pass_signal(&mut self, arrived: ReceivedSignal) -> Result<(), Outcome> {
        if self.with_terminal(|terminal, send| terminal.signal(&arrived, send)) {
            return Ok(());
        }
        if arrived.number == Signal::TTOU.as_raw() {
            return Ok(());
        }
        self.pass_or_note(arrived.number)
    }

    /// Reports a problem with the reason that another process gives.
    fn report_problem(&self, what: &str, why: &str) {
        self.reporter.problem(format_args!("{what}: {}", printable(why)));
    }
}

/// Ends a start by a signal. Those of job control do not end it.
fn end_start(arrived: &ReceivedSignal) -> Result<(), Outcome> {
    let of_jobs = [Signal::TTOU, Signal::CONT, Signal::WINCH].map(Signal::as_raw);
    if of_jobs.contains(&arrived.number) {
        return Ok(());
    }
    if arrived.number == Signal::TSTP.as_raw() {
        // Nothing is lost: the other processes of the start wait.
        let _ = signals::stop(Signal::TSTP, false);
        return Ok(());
    }
    let status = Ending::Killed(arrived.number).exit_status();
    Err(Outcome { status, problem: None, ending: None })
}

/// Returns the outcome for a process that reports its failure.
fn failed(who: &str, why: &str) -> Outcome {
    Outcome::failed(format!("{who} failed: {}", printable(why)))
}
