//! `ringfence run` on a terminal: control keys, job control and the terminal's size.

use std::fs::File;
use std::io::Write;
use std::process::{Child, Command, Stdio};

use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use crate::require;
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, Said, eventually};

/// Program that starts a session with a controlling terminal of its own.
const SETSID: Need = Need::Program("setsid", "util-linux");

/// Terminal with a session on it.
struct Screen {
    keyboard: File,
    said: Said,
    session: Child,
    read: usize,
}

impl Screen {
    /// Starts a command as the leader of a session on a new terminal.
    fn start(lab: &Lab, command: &[&str]) -> Screen {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags).unwrap();
        rustix::pty::grantpt(&master).unwrap();
        rustix::pty::unlockpt(&master).unwrap();
        let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
        let slave = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let session = Command::new("setsid")
            // The caller may ignore signals, and children inherit that.
            .args(["--ctty", "--wait", "env", "--default-signal"])
            .args(command)
            .env("XDG_RUNTIME_DIR", lab.runtime_dir().parent().unwrap())
            .env("PS1", "outer> ")
            .env_remove("ENV")
            .current_dir(lab.file("x").parent().unwrap())
            .stdin(Stdio::from(slave.try_clone().unwrap()))
            .stdout(Stdio::from(slave.try_clone().unwrap()))
            .stderr(Stdio::from(slave))
            .spawn()
            .unwrap();
        let keyboard = File::from(master);
        let said = Said::default();
        // Reading ends with the last process on the terminal.
        said.listen(keyboard.try_clone().unwrap());
        Screen { keyboard, said, session, read: 0 }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Types a line to `cat`. The terminal echoes it, and `cat` repeats it.
    fn type_to_cat(&mut self, line: &str) {
        self.press(&format!("{line}\n"));
        self.expect(line);
        self.expect(line);
    }

    /// Waits until the text is on the screen, after the text of the last call.
    fn expect(&mut self, text: &str) {
        let found = eventually(MOMENT, || self.said.text()[self.read..].contains(text));
        let all = self.said.text();
        assert!(found, "{text:?} did not come; the screen:\n{all}");
        self.read += all[self.read..].find(text).unwrap() + text.len();
    }

    fn resize(&self, columns: u16) {
        let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&self.keyboard, size).unwrap();
    }

    fn finish(mut self) -> i32 {
        let mut status = None;
        eventually(MOMENT, || {
            status = self.session.try_wait().unwrap();
            status.is_some()
        });
        let status =
            status.unwrap_or_else(|| panic!("still runs; the screen:\n{}", self.said.text()));
        status.code().unwrap()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The kernel hangs up a session without leader and terminal.
        let _ = self.session.kill();
        let _ = self.session.wait();
    }
}

const RINGFENCE: &str = env!("CARGO_BIN_EXE_ringfence");

#[test]
fn ctrl_c_ends_only_guest_of_that_terminal() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    // The key is pressed in the terminal of the guest that started the driver domain.
    let mut first = Screen::start(
        &lab,
        &[
            RINGFENCE, "run", "--uplink", "none", "--switch", "default", "--name", "first", "--",
            "cat",
        ],
    );
    first.expect("first is on switch");
    let mut second = lab.script("--name second", "echo up; sleep 1000");
    second.wait_for_output("up");
    let driver = crate::support::processes::all().into_iter().find(|process| {
        process.is_role("driver") && second.pid() != process.pid && is_of(process, &first)
    });
    first.type_to_cat("typed");
    first.press("\x03");
    assert_eq!(first.finish(), 130);
    assert!(second.is_running());
    assert!(driver.expect("the first one started it").is_alive());
    assert_eq!(second.end().status, Some(143));
    lab.assert_no_switch();
}

/// The scheduler divides the processors among sessions, so the uplink stays in that of its guest. The keys of the terminal,
/// and writes to its input, are not for it.
#[test]
fn uplink_shares_session_of_its_guest_but_not_terminal() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let run = [RINGFENCE, "run", "-q", "--switch", "none", "--uplink", "host", "--", "cat"];
    let mut screen = Screen::start(&lab, &run);
    screen.type_to_cat("typed");
    let leader = rustix::process::Pid::from_child(&screen.session);
    let all = crate::support::processes::descendants(leader);
    let launcher = all.iter().find(|process| process.pid == leader).unwrap();
    let [_, session, terminal] = launcher.job();
    assert_ne!(terminal, 0, "the launcher has the terminal");
    let uplink = all.iter().find(|process| process.is_role("uplink")).unwrap();
    let supervisor = all.iter().find(|p| p.pid.as_raw_nonzero().get() == uplink.parent).unwrap();
    let group = supervisor.pid.as_raw_nonzero().get();
    for process in [supervisor, uplink] {
        assert_eq!(process.job(), [group, session, 0], "{process:?}");
    }
    screen.press("\x03");
    assert_eq!(screen.finish(), 130);
    lab.assert_no_switch();
}

/// Returns `true` if the driver domain was started from the screen: its launcher is the session's leader.
fn is_of(process: &crate::support::processes::Process, screen: &Screen) -> bool {
    let root = rustix::process::Pid::from_child(&screen.session);
    crate::support::processes::descendants(root).contains(process)
}

#[test]
fn command_that_handles_ctrl_c_continues() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let script = "n=0; trap 'n=$((n+1)); echo caught $n' INT; echo ready; \
                  while [ $n -lt 2 ]; do sleep 0.05; done; exit 8";
    let mut screen = Screen::start(
        &lab,
        &[RINGFENCE, "run", "-q", "--uplink", "none", "--", "sh", "-c", script],
    );
    screen.expect("ready");
    // Each key causes one signal.
    for text in ["caught 1", "caught 2"] {
        screen.press("\x03");
        screen.expect(text);
    }
    assert_eq!(screen.finish(), 8);
    lab.assert_no_switch();
}

#[test]
fn shell_stops_and_continues_guest_as_job() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let mut shell = Screen::start(&lab, &["sh", "-im"]);
    shell.expect("outer> ");
    shell.press(&format!("{RINGFENCE} run --name job -- cat\n"));
    shell.expect("job is on switch");
    // Not a word of the messages ("alone"): the key would stop the guest before `cat` runs.
    shell.type_to_cat("line 1");
    shell.press("\x1a");
    shell.expect("outer> ");
    shell.press("jobs\n");
    shell.expect("Stopped");
    shell.expect("outer> ");
    shell.press("fg\n");
    shell.expect("run --name job -- cat");
    shell.type_to_cat("line 2");
    // End of its input.
    shell.press("\x04");
    shell.expect("outer> ");
    shell.press("echo status $?\n");
    shell.expect("status 0");
    shell.press("exit\n");
    assert_eq!(shell.finish(), 0);
    lab.assert_no_switch();
}

#[test]
fn shell_in_guest_has_job_control_and_returns_terminal() {
    require!(Need::Guests, SETSID, Need::Program("bash", "bash"));
    let lab = Lab::new();
    let mut outer = Screen::start(&lab, &["sh", "-im"]);
    outer.expect("outer> ");
    // Not `sh`: dash wants to restore the process group that had the terminal before. Its leader has no process id
    // in the guest.
    let inner = format!("PS1='inner> ' {RINGFENCE} run -q -- bash --norc --noprofile -i\n");
    outer.press(&inner);
    outer.expect("inner> ");
    outer.press("cat\n");
    outer.type_to_cat("one");
    outer.press("\x1a");
    outer.expect("inner> ");
    outer.press("jobs\n");
    outer.expect("Stopped");
    outer.expect("inner> ");
    outer.press("fg\n");
    outer.expect("cat");
    outer.type_to_cat("two");
    // The key ends the job, but neither the shell in the guest nor the guest.
    outer.press("\x03");
    outer.expect("inner> ");
    outer.press("hostname\n");
    outer.expect("guest-");
    outer.press("exit 5\n");
    outer.expect("outer> ");
    outer.press("echo status $?\n");
    outer.expect("status 5");
    let all = outer.said.text();
    assert!(!all.contains("terminal process group") && !all.contains("job control"), "{all}");
    // The outer shell is in the foreground again: it can read, and start other commands.
    outer.press("cat\n");
    outer.type_to_cat("three");
    outer.press("\x04");
    outer.expect("outer> ");
    outer.press("exit\n");
    assert_eq!(outer.finish(), 0);
    lab.assert_no_switch();
}

#[test]
fn shell_of_a_guest_in_a_guest_has_job_control() {
    require!(Need::Guests, SETSID, Need::Program("bash", "bash"));
    let lab = Lab::new();
    // The process group of the inner launcher has its leader outside of the outer guest.
    let quiet = [RINGFENCE, "run", "-q", "--uplink", "none", "--switch", "none", "--"];
    let shell = ["bash", "--norc", "--noprofile", "-i"];
    let words: Vec<&str> = quiet.iter().chain(&quiet).chain(&shell).copied().collect();
    let mut screen = Screen::start(&lab, &words);
    screen.expect("outer> ");
    // Until its output, the shell's editor of lines has the terminal in another mode.
    screen.press("echo now; cat\n");
    screen.expect("now");
    screen.expect("now");
    screen.type_to_cat("one");
    screen.press("\x1a");
    screen.expect("Stopped");
    screen.expect("outer> ");
    screen.press("fg\n");
    screen.expect("cat");
    screen.press("\x03");
    screen.expect("outer> ");
    screen.press("exit 7\n");
    screen.expect("exit");
    let all = screen.said.text();
    assert!(!all.contains("terminal process group") && !all.contains("job control"), "{all}");
    assert_eq!(screen.finish(), 7);
    lab.assert_no_switch();
}

#[test]
fn command_sees_terminal_size_and_its_changes() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let script = "trap 'stty size; exit 0' WINCH; stty size; while :; do sleep 0.05; done";
    let mut screen = Screen::start(
        &lab,
        &[
            "sh",
            "-c",
            "read line; exec \"$@\"",
            "sh",
            RINGFENCE,
            "run",
            "-q",
            "--uplink",
            "none",
            "--",
            "sh",
            "-c",
            script,
        ],
    );
    screen.resize(81);
    screen.press("go\n");
    screen.expect("24 81");
    screen.resize(99);
    screen.expect("24 99");
    assert_eq!(screen.finish(), 0);
}

#[test]
fn guest_without_driver_domain_restores_terminal() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let mut screen = Screen::start(&lab, &["sh", "-im"]);
    screen.expect("outer> ");
    screen.press(&format!("{RINGFENCE} run -q -- sh -c 'stty -echo; echo set; sleep 1000'\n"));
    screen.expect("set\r\n");
    let driver = crate::support::processes::all()
        .into_iter()
        .find(|process| process.is_role("driver") && is_of(process, &screen));
    driver.unwrap().signal(rustix::process::Signal::KILL);
    screen.expect("was killed by signal 9 (SIGKILL); this guest ends with it");
    screen.expect("outer> ");
    let modes = rustix::termios::tcgetattr(&screen.keyboard).unwrap();
    assert!(modes.local_modes.contains(rustix::termios::LocalModes::ECHO));
    screen.press("exit\n");
    screen.finish();
    lab.assert_no_switch();
}

#[test]
fn exec_on_a_terminal_gives_the_command_a_terminal_of_its_own() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let guest = lab.run("-q --name web --switch none", &["sleep", "1000"]);
    let listed = || lab.spawn(&[lab.program(), "ps"]).finish(MOMENT).stdout.contains("web");
    assert!(eventually(MOMENT, listed));
    let mut screen = Screen::start(&lab, &[lab.program(), "exec", "web", "--", "sh", "-i"]);
    screen.resize(97);
    screen.press("test -t 0 && test -t 1 && echo is-a-$((6*7))\n");
    screen.expect("is-a-42");
    let resized = |screen: &mut Screen| {
        screen.resize(101);
        screen.press("stty size; echo end-$((1+1))\n");
        screen.expect("end-2");
        screen.said.text().contains("24 101")
    };
    assert!(eventually(MOMENT, || resized(&mut screen)), "{}", screen.said.text());
    // Ctrl-C reaches the foreground command and not the shell.
    screen.press("sleep 1000; echo went-$((2+1))\n");
    screen.expect("sleep 1000");
    std::thread::sleep(std::time::Duration::from_millis(300));
    screen.press("\x03");
    screen.press("echo back-$((2+2))\n");
    screen.expect("back-4");
    screen.press("exit 5\n");
    let status = screen.session.wait().unwrap();
    assert_eq!(status.code(), Some(5), "{}", screen.said.text());
    guest.end();
}
