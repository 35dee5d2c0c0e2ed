//! `ringfence run` on a terminal: control keys, job control and the terminal's size.

use std::os::unix::fs::MetadataExt;

use crate::require;
use crate::support::needs::Need;
use crate::support::screen::{SETSID, Screen};
use crate::support::{Lab, MOMENT, eventually};

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
    // The echo of the line does not look like the prompt: keys typed before it would be the guest's terminal's to echo.
    let inner = format!("PS1=in'ner> ' {RINGFENCE} run -q -- bash --norc --noprofile -i\n");
    outer.press(&inner);
    outer.expect("inner> ");
    // Until its output, the shell's editor of lines has the terminal in another mode.
    outer.press("echo now; cat\n");
    outer.expect("now");
    outer.expect("now");
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

/// Starts an interactive shell with job control.
fn shell(lab: &Lab) -> Screen {
    let mut shell = Screen::start(lab, &["sh", "-im"]);
    shell.expect("outer> ");
    shell
}

/// Words that start a guest without networks.
fn run(options: &str) -> String {
    format!("{RINGFENCE} run -q --uplink none --switch none {options} --")
}

#[test]
fn command_has_a_session_a_group_and_a_terminal_of_its_own() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let mut screen = Screen::start(
        &lab,
        &["sh", "-c", &format!("{} sh -c 'echo ready; exec cat'; true", run(""))],
    );
    screen.expect("ready");
    screen.type_to_cat("typed");
    let leader = rustix::process::Pid::from_child(&screen.session);
    let all = crate::support::processes::descendants(leader);
    let job = |found: &dyn Fn(&crate::support::processes::Process) -> bool| {
        all.iter().find(|process| found(process)).unwrap().job()
    };
    let command = job(&|process| process.arguments == ["cat", ""]);
    let init = job(&|process| process.is_role("guest-init"));
    let launcher = job(&|process| process.arguments[0] == RINGFENCE);
    assert_ne!(command[0], init[0], "group");
    assert_eq!(command[1..], init[1..], "session and terminal");
    // Terminals of two instances of devpts have equal numbers. The streams below tell them apart.
    let differs = |at: usize| launcher[at] != command[at];
    assert!(differs(0) && differs(1), "{launcher:?} {command:?}");
    // The command has no descriptor of the screen, the launcher has.
    let streams = |found: &dyn Fn(&crate::support::processes::Process) -> bool| {
        let pid = all.iter().find(|process| found(process)).unwrap().pid;
        let facts = |number| std::fs::metadata(format!("/proc/{pid}/fd/{number}")).unwrap();
        [0, 1, 2].map(facts).map(|facts| (facts.dev(), facts.ino()))
    };
    let of_launcher = streams(&|process| process.arguments[0] == RINGFENCE);
    let own = streams(&|process| process.arguments == ["cat", ""]);
    assert!(own.iter().all(|stream| !of_launcher.contains(stream)), "{own:?}");
    screen.press("\x04");
    assert_eq!(screen.finish(), 0);
}

#[test]
fn key_that_ends_the_command_ends_the_script_around_it() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let mut shell = shell(&lab);
    let script = format!("{} sh -c 'echo ready; exec sleep 600'; echo went on", run(""));
    std::fs::write(lab.file("script"), script).unwrap();
    shell.press("sh script\n");
    shell.expect("ready");
    shell.press("\x03");
    shell.expect("outer> ");
    shell.press("echo status $?\n");
    shell.expect("status 130");
    assert!(!shell.said.text().contains("went on"), "{}", shell.said.text());
    // A command that sends itself the signal does not.
    let script = format!("{} sh -c 'kill -INT $$'; echo went on", run(""));
    std::fs::write(lab.file("script"), script).unwrap();
    shell.press("sh script\n");
    shell.expect("went on");
    shell.press("exit\n");
    shell.finish();
}

#[test]
fn key_that_stops_the_command_stops_the_script_around_it() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let mut shell = shell(&lab);
    let script = format!("{} sh -c 'echo ready; exec cat'; echo went on", run(""));
    std::fs::write(lab.file("script"), script).unwrap();
    shell.press("sh script\n");
    shell.expect("ready");
    shell.type_to_cat("one");
    shell.press("\x1a");
    shell.expect("Stopped");
    shell.expect("outer> ");
    // The terminal echoes again.
    shell.press("echo back-$((40+2))\n");
    shell.expect("back-42");
    shell.press("fg\n");
    shell.expect("sh script");
    shell.type_to_cat("two");
    shell.press("\x04");
    shell.expect("went on");
    shell.press("exit\n");
    assert_eq!(shell.finish(), 0);
}

#[test]
fn command_in_the_background_stops_when_it_reads_the_terminal() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let mut shell = shell(&lab);
    for options in ["", "--terminal shared"] {
        let script = "sleep 0.5; read line; echo got-$line; read more; echo more-$more";
        shell.press(&format!("{} sh -c '{script}' &\n", run(options)));
        // The keys are the shell's meanwhile.
        shell.press("echo here-$((40+2))\n");
        shell.expect("here-42");
        let stopped = |shell: &mut Screen| {
            shell.press("jobs\n");
            shell.expect("[1] + ");
            shell.expect("ringfence run").contains("Stopped")
        };
        assert!(eventually(MOMENT, || stopped(&mut shell)), "{options} {}", shell.said.text());
        shell.press("fg\n");
        shell.expect("sh -c");
        shell.press("first\n");
        shell.expect("got-first");
        shell.press("second\n");
        shell.expect("more-second");
        shell.expect("outer> ");
    }
    shell.press("exit\n");
    shell.finish();
}

#[test]
fn command_that_ends_in_the_background_leaves_the_terminal_to_its_shell() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let mut shell = shell(&lab);
    for options in ["", "--terminal shared"] {
        // The first one stops, because it reads the terminal, and is killed.
        for (script, end) in [("read line", "sleep 1; kill -9 $!"), ("true", "wait")] {
            shell.press(&format!("{} sh -c '{script}' & {end}\n", run(options)));
            shell.press("echo here-$((40+2))\n");
            shell.expect("here-42");
            shell.expect("outer> ");
        }
    }
    shell.press("exit\n");
    shell.finish();
}

#[test]
fn command_in_a_pipeline_gets_keys_once_it_reads_the_terminal() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let mut shell = shell(&lab);
    for options in ["", "--terminal shared"] {
        // Standard input and output are pipes. A key for the job reaches the command, too.
        let script = "cat; read line < /dev/tty; echo got-$line; trap \"exit 4\" INT; echo ready; \
                      while :; do sleep 0.05; done";
        shell.press(&format!("echo piped | {} sh -c '{script}' | cat\n", run(options)));
        shell.expect("\r\npiped");
        shell.press("typed\n");
        shell.expect("got-typed");
        shell.expect("ready");
        shell.press("\x03");
        shell.expect("outer> ");
        // Standard input is the terminal, and standard output is not.
        let script = "echo up; read line; echo got-$line; stty size < /dev/tty";
        shell.press(&format!("{} sh -c '{script}' | cat\n", run(options)));
        shell.expect("\r\nup");
        shell.press("again\n");
        shell.expect("got-again");
        shell.expect("outer> ");
        shell.press("echo echoes-$((40+2))\n");
        shell.expect("echo echoes");
        shell.expect("echoes-42");
    }
    shell.press("exit\n");
    shell.finish();
}

#[test]
fn program_behind_the_command_in_a_pipeline_keeps_its_keys() {
    require!(Need::Guests, SETSID, Need::Program("python3", "python3"));
    let lab = Lab::new();
    // Reads a password from the terminal, as ssh does, and later writes its output.
    let asks = "
import getpass, time
word = getpass.getpass('password: ')
time.sleep(0.5)
print('len', len(word), flush=True)
time.sleep(600)";
    std::fs::write(lab.file("asks.py"), asks).unwrap();
    // A pager: it has the terminal in raw mode, and reads keys after the first line of its input.
    let pager = "
import os, sys, termios, tty
terminal = os.open('/dev/tty', os.O_RDWR)
modes = termios.tcgetattr(terminal)
tty.setraw(terminal)
line = sys.stdin.readline().strip()
os.write(terminal, b'page ' + line.encode())
key = os.read(terminal, 1)
termios.tcsetattr(terminal, termios.TCSANOW, modes)
os.write(terminal, b'key ' + key)";
    std::fs::write(lab.file("pager.py"), pager).unwrap();
    let mut shell = shell(&lab);
    shell.press(&format!("{} python3 asks.py | python3 pager.py\n", run("")));
    shell.expect("password: ");
    shell.press("secret\r");
    shell.expect("page len 6");
    shell.press("q");
    shell.expect("key q");
}

#[test]
fn command_ends_with_its_terminal_unless_it_ignores_the_hang_up() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    for (wrapper, survives) in [("", false), ("nohup ", true)] {
        let script = "touch up; until [ -e hung-up ]; do sleep 0.1; done; sleep 1; touch survived; sleep 600";
        let line = format!("{wrapper}{} sh -c '{script}'", run("--name hung"));
        let mut screen = Screen::start(&lab, &["sh", "-c", &format!("{line}; true")]);
        assert!(eventually(MOMENT, || lab.file("up").exists()));
        let leader = rustix::process::Pid::from_child(&screen.session);
        let all = crate::support::processes::descendants(leader);
        // The command itself: the other processes have its words further behind.
        let is_command = |process: &&crate::support::processes::Process| {
            process.arguments.get(2).is_some_and(|word| word == script)
        };
        let command = all.iter().find(is_command).unwrap().clone();
        // The last descriptor of the keyboard's end hangs up the terminal.
        screen.hang_up();
        if survives {
            std::fs::write(lab.file("hung-up"), "").unwrap();
            assert!(eventually(MOMENT, || lab.file("survived").exists()));
            let stopped = lab.spawn(&[RINGFENCE, "stop", "hung"]).finish(MOMENT);
            assert_eq!(stopped.status, Some(0), "{}", stopped.stderr);
        } else {
            assert!(eventually(MOMENT, || !command.is_alive()));
            assert!(!lab.file("survived").exists());
        }
        std::fs::remove_file(lab.file("up")).unwrap();
    }
}

#[test]
fn shell_stops_and_continues_guest_that_shares_its_terminal() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let mut shell = shell(&lab);
    shell.press(&format!("{} sh -c 'tty; exec cat'\n", run("--terminal shared")));
    // A `/dev` of the guest's own has the caller's terminal as its console.
    shell.expect(if rustix::process::geteuid().is_root() { "/dev/console" } else { "/dev/pts/" });
    shell.type_to_cat("one");
    shell.press("\x1a");
    shell.expect("Stopped");
    shell.expect("outer> ");
    shell.press("fg\n");
    shell.expect("exec cat");
    shell.type_to_cat("two");
    shell.press("\x03");
    shell.expect("outer> ");
    shell.press("echo status $?\n");
    shell.expect("status 130");
    shell.press("exit\n");
    assert_eq!(shell.finish(), 0);
}

#[test]
fn large_output_passes_a_terminal_unchanged() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let script = "stty -opost; i=0; while [ $i -lt 20000 ]; do echo line-$i-abcdefghijklmnopqrstuvwxyz; \
                  i=$((i+1)); done; echo end-of-output";
    let mut screen = Screen::start(&lab, &["sh", "-c", &format!("{} sh -c '{script}'", run(""))]);
    screen.expect("end-of-output");
    let text = screen.said.text();
    let expected: String =
        (0..20000).map(|i| format!("line-{i}-abcdefghijklmnopqrstuvwxyz\n")).collect();
    assert!(text.contains(&expected), "{} bytes of {}", text.len(), expected.len());
    assert_eq!(screen.finish(), 0);
}

#[test]
fn exec_gives_a_terminal_for_each_stream_that_is_one() {
    require!(Need::Guests, SETSID);
    let lab = Lab::new();
    let guest = lab.run("-q --name web --switch none", &["sleep", "1000"]);
    let listed = || lab.spawn(&[lab.program(), "ps"]).finish(MOMENT).stdout.contains("web");
    assert!(eventually(MOMENT, listed));
    let mut shell = shell(&lab);
    let exec = format!("{} exec web --", lab.program());
    let script = "echo up; read line; echo got-$line; test -t 1 || echo a-pipe";
    shell.press(&format!("{exec} sh -c '{script}' | cat\n"));
    shell.expect("\r\nup");
    shell.press("typed\n");
    shell.expect("got-typed");
    shell.expect("a-pipe");
    shell.expect("outer> ");
    // Its terminal is one of the guest's.
    let script = "cat; stty -echo < /dev/tty; read line < /dev/tty; echo got-$line";
    shell.press(&format!("echo piped | {exec} sh -c '{script}'\n"));
    shell.expect("\r\npiped");
    std::thread::sleep(std::time::Duration::from_millis(500));
    shell.press("secret\n");
    shell.expect("got-secret");
    shell.expect("outer> ");
    shell.press("exit\n");
    shell.finish();
    guest.end();
}
