//! Getting to the driver domain of a switch, starting it if there is none.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::proof;
use super::report::{Reporter, last_line, printable};
use super::runtime_dir::{RuntimeDir, RuntimeDirError};
use ringfence_sys::descriptors::Descriptors;

use crate::switchboard::{AttachRequest, Attached, DriverConfig, FromDriver, ToDriver};
use ringfence_sandbox::Ending;
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sandbox::spawn::{Cleanup, DomainKind, DomainProcess, Spawn, SpawnError};
use ringfence_sandbox::supervisor::ExitReport;

/// How long a driver domain may take to answer, or to be gone when it is on its way out.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A attachment at a switch.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// What the guest was given.
    pub(crate) attached: Attached,
    /// To the driver domain, which detaches the guest when this is closed.
    pub(crate) lease: Channel,
    /// The connection to the hub for the guest's frontend.
    pub(crate) frontend_hub: OwnedFd,
    /// The connection to the store for the guest's names.
    pub(crate) names: OwnedFd,
    /// The driver domain, if this launcher started it.
    pub(crate) driver: Option<DomainProcess>,
}

/// Why there is no attachment.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RendezvousError {
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    #[error("the driver domain: {0}")]
    Channel(#[from] ChannelError),
    #[error("the driver domain of switch `{switch}` {ending} as it was started{}", because(why.as_deref()))]
    Failed { switch: String, ending: Ending, why: Option<String> },
    #[error("switch `{switch}`: {why}")]
    Refused { switch: String, why: String },
    #[error("the driver domain of switch `{switch}` neither answers nor ends")]
    Stuck { switch: String },
}

/// ": WHY", or nothing.
pub(crate) fn because(why: Option<&str>) -> String {
    why.map_or_else(String::new, |why| format!(": {why}"))
}

/// Attaches a guest to a switch.
pub(crate) fn attach(
    directory: &RuntimeDir,
    switch: &str,
    request: &AttachRequest,
    reporter: Reporter,
) -> Result<Attachment, RendezvousError> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    loop {
        let (lease, driver) = reach(directory, switch, reporter)?;
        match ask(&lease, request) {
            Ok((FromDriver::Attached(attached), fds)) => {
                let [frontend_hub, names] = expect_fds(fds)?;
                return Ok(Attachment { attached: *attached, lease, frontend_hub, names, driver });
            }
            Ok((FromDriver::Refused(why), _)) => {
                let why = printable(&why);
                return Err(RendezvousError::Refused { switch: switch.to_owned(), why });
            }
            // It ended before it answered; or what answers is a keeper, with an exit_report.
            Ok(_) | Err(ChannelError::Closed | ChannelError::Malformed(_)) => {}
            Err(ChannelError::TimedOut(_)) => {
                return Err(RendezvousError::Stuck { switch: switch.to_owned() });
            }
            Err(error) => return Err(error.into()),
        }
        if let Some(driver) = driver {
            return Err(failed(switch, &driver));
        }
        if Instant::now() >= deadline {
            return Err(RendezvousError::Stuck { switch: switch.to_owned() });
        }
        reporter.step("the driver domain was on its way out; trying again");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ask(
    lease: &Channel,
    request: &AttachRequest,
) -> Result<(FromDriver, Descriptors), ChannelError> {
    proof::introduce(lease)?;
    lease.send(&ToDriver::Attach(Box::new(request.clone())), &[])?;
    lease.receive_within(ANSWER_TIMEOUT)
}

/// Asks the keeper of a driver domain that has just ended how it did; `None` where the keeper is
/// gone, too.
pub(crate) fn ask_exit_report(directory: &RuntimeDir, switch: &str) -> Option<ExitReport> {
    let socket = directory.connect(switch).ok()??;
    let (exit_report, _) =
        Channel::from_fd(socket).receive_within(Duration::from_millis(500)).ok()?;
    Some(exit_report)
}

fn failed(switch: &str, driver: &DomainProcess) -> RendezvousError {
    let ended = driver.wait_ended(Duration::from_secs(2));
    let (ending, words) = match ended {
        Some(ended) => (ended.ending, ended.stderr_tail),
        None => (Ending::Unknown, String::new()),
    };
    RendezvousError::Failed { switch: switch.to_owned(), ending, why: last_line(&words) }
}

/// Connects to the switch's hub. One launcher at a time, so that only one finds nobody there.
fn reach(
    directory: &RuntimeDir,
    switch: &str,
    reporter: Reporter,
) -> Result<(Channel, Option<DomainProcess>), RendezvousError> {
    let lock = directory.lock()?;
    if let Some(hub) = directory.connect(switch)? {
        reporter.step(format_args!("switch `{switch}` is there"));
        return Ok((Channel::from_fd(hub), None));
    }
    let (listener, socket) = directory.listen(switch, &lock)?;
    let cleanup = Cleanup {
        directory: directory.as_fd(),
        socket: socket.clone(),
        listener: listener.as_fd(),
    };
    let spawn =
        Spawn { kind: DomainKind::Driver, command: &[], inherit: &[], cleanup: Some(cleanup) };
    let started = DomainProcess::start(&spawn).map_err(RendezvousError::from).and_then(|driver| {
        let config = DriverConfig { switch: switch.to_owned(), verbose: reporter.is_verbose() };
        let namespace = proof::own_user_namespace().map_err(ChannelError::from)?;
        driver.channel().send(&config, &[listener.as_fd(), namespace.as_fd()])?;
        Ok(driver)
    });
    let driver = started.inspect_err(|_| directory.withdraw(&socket, &lock))?;
    reporter.step(format_args!(
        "switch `{switch}` is new: started its driver domain, kept by process {}",
        driver.supervisor_pid()
    ));
    // It is queued until the driver domain listens to it.
    let hub = directory.connect(switch)?.ok_or_else(|| failed(switch, &driver))?;
    Ok((Channel::from_fd(hub), Some(driver)))
}
