//! Trial of a guest: `ringfence run` with a command that does nothing.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringfence_hostnet::text::last_line;
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::spawn::THIS_PROGRAM;

/// Time limit of the guest.
const LIMIT: Duration = Duration::from_secs(30);
/// Interval at which its end is looked for.
const INTERVAL: Duration = Duration::from_millis(5);

/// Starts a guest and waits for its end.
///
/// # Errors
///
/// Returns the reason in words, as `ringfence run` prints it.
pub(super) fn start_guest() -> Result<(), String> {
    let mut run = Command::new(THIS_PROGRAM);
    run.arg0("ringfence").args(["run", "--quiet", "--", "true"]);
    run.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut run = run.spawn().map_err(|error| format!("it cannot be started: {error}"))?;
    // Other statuses are those of the command: the guest ran.
    if wait(&mut run)?.is_some_and(|status| status != i32::from(STATUS_FAILED)) {
        return Ok(());
    }
    let mut stderr = String::new();
    if let Some(mut pipe) = run.stderr.take() {
        // What was read so far is the reason.
        let _ = pipe.read_to_string(&mut stderr);
    }
    let said = last_line(&stderr).unwrap_or_else(|| "it failed without a message".to_owned());
    Err(said.strip_prefix("ringfence: ").unwrap_or(&said).to_owned())
}

/// Waits for the end of the launcher, which is killed at the time limit. Returns its exit status.
fn wait(run: &mut Child) -> Result<Option<i32>, String> {
    let until = Instant::now() + LIMIT;
    loop {
        match run.try_wait() {
            Ok(Some(status)) => return Ok(status.code()),
            Ok(None) if Instant::now() < until => std::thread::sleep(INTERVAL),
            Ok(None) => {
                // Its end ends the guest. It may have ended by itself now.
                let _ = run.kill();
                let _ = run.wait();
                return Err(format!("it did not end within {} s", LIMIT.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}
