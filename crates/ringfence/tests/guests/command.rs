//! Interface between the user's shell and the command: streams, descriptors, signals and exit status. No process
//! or file is left, whichever process is killed.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::process::{Signal, kill_process};

use crate::require;
use crate::support::needs::Need;
use crate::support::processes::Process;
use crate::support::{GONE_WITHIN, Lab, MOMENT, Running, eventually};

#[test]
fn exit_status_of_command_is_returned() {
    require!(Need::Guests);
    let lab = Lab::new();
    for (script, status) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill $$", 143)] {
        assert_eq!(lab.script("-q", script).finish(MOMENT).status, Some(status), "{script}");
    }
    lab.assert_no_switch();
}

#[test]
fn command_that_cannot_run_returns_status_of_shell() {
    require!(Need::Guests);
    let lab = Lab::new();
    std::fs::write(lab.file("data"), "not a program").unwrap();
    for (command, status, why) in [
        ("no-such-command", 127, "no-such-command: command not found"),
        ("./no-such-file", 127, "./no-such-file: command not found"),
        ("./data", 126, "./data: cannot be run: Permission denied"),
    ] {
        let finished = lab.run("-q", &[command]).finish(MOMENT);
        assert_eq!(finished.status, Some(status), "{command}");
        assert!(finished.stderr.contains(why), "{command}: {}", finished.stderr);
    }
}

#[test]
fn run_prints_a_line_for_switch_and_interface_unless_quiet_or_verbose() {
    require!(Need::Guests);
    let lab = Lab::new();
    let said = |options: &str| lab.run(options, &["true"]).finish(MOMENT).stderr;
    let normal = said("--name web --switch blue --address 10.9.8.7/24 --mtu 9000");
    // Root also gets the notice that the command is root.
    let from = normal.find("ringfence: web").unwrap();
    assert_eq!(
        &normal[from..],
        "ringfence: web is on switch `blue`, with all guests that name it\n\
         ringfence: eth0: 10.9.8.7/24, MTU 9000, mode copy\n"
    );
    for line in normal.lines() {
        assert!(line.len() <= 80, "{line}");
    }
    assert_eq!(said("-q"), "");
    let verbose = said("-v");
    assert!(verbose.lines().count() > 3, "{verbose}");
    assert!(verbose.lines().all(|line| line.starts_with("ringfence: ")), "{verbose}");
}

#[test]
fn streams_pass_bytes_unchanged() {
    require!(Need::Guests);
    let lab = Lab::new();
    let bytes: Vec<u8> = (0..1_000_000_u32).flat_map(|i| i.wrapping_mul(i).to_ne_bytes()).collect();
    let mut child = Command::new(env!("CARGO_BIN_EXE_ringfence"))
        .args(["run", "-q", "--uplink", "none", "--", "cat"])
        .env("XDG_RUNTIME_DIR", lab.runtime_dir().parent().unwrap())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let written = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&written));
    let mut read = Vec::new();
    stdout.read_to_end(&mut read).unwrap();
    writer.join().unwrap().unwrap();
    assert!(read == bytes, "{} bytes came back of {}", read.len(), bytes.len());
    assert!(child.wait().unwrap().success());
}

#[test]
fn command_inherits_descriptors_environment_and_directory() {
    require!(Need::Guests);
    let lab = Lab::new();
    std::fs::write(lab.file("seven"), "the seventh").unwrap();
    let ringfence = env!("CARGO_BIN_EXE_ringfence");
    let script = format!(
        "export COLOUR=blue; exec 7<seven; \
         {ringfence} run -q -- sh -c 'cat <&7; echo; echo $COLOUR; pwd'"
    );
    let said = lab.spawn(&["sh", "-ec", &script]).succeed(MOMENT);
    let directory = lab.file("seven").parent().unwrap().display().to_string();
    assert_eq!(said, format!("the seventh\nblue\n{directory}\n"));
}

#[test]
fn sandboxed_processes_have_nothing_of_the_environment() {
    // Nobody else may read the environment of a process that is not dumpable.
    require!(Need::Guests, Need::Root);
    let lab = Lab::new();
    let run = [env!("CARGO_BIN_EXE_ringfence"), "run", "-q", "--"];
    let command = ["sh", "-c", "echo up; exec sleep 300"];
    let guest = lab.spawn(&[&["env", "SECRET=1"][..], &run, &command].concat());
    guest.wait_for_output("up");
    for role in ["driver", "frontend", "uplink"] {
        let process = guest.inner(role);
        let environ = std::fs::read(format!("/proc/{}/environ", process.pid)).unwrap();
        assert!(environ.is_empty(), "{role}: {}", String::from_utf8_lossy(&environ));
    }
    assert_eq!(guest.end().status, Some(143));
}

#[test]
fn driver_domain_holds_no_stream_of_its_first_guest() {
    require!(Need::Guests);
    let lab = Lab::new();
    make_pipe(&lab, "gate");
    let first = lab.script("--name first", "read line < gate || true; echo done");
    first.wait_up();
    let second = lab.script("--name second", "echo here; sleep 60");
    second.wait_for_output("here");
    std::fs::write(lab.file("gate"), "go\n").unwrap();
    // `finish` waits for the end of the streams.
    assert_eq!(first.succeed(MOMENT), "done\n");
    assert_eq!(second.end().status, Some(143));
    lab.assert_no_switch();
}

fn make_pipe(lab: &Lab, name: &str) {
    let status = Command::new("mkfifo").arg(lab.file(name)).status().unwrap();
    assert!(status.success());
}

#[test]
fn signal_to_launcher_reaches_command() {
    require!(Need::Guests);
    let lab = Lab::new();
    for (name, signal) in [
        ("TERM", Signal::TERM),
        ("HUP", Signal::HUP),
        ("INT", Signal::INT),
        ("QUIT", Signal::QUIT),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
    ] {
        let script = format!(
            "trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.05; done"
        );
        let running = lab.script("-q", &script);
        running.wait_for_output("ready");
        kill_process(running.pid(), signal).unwrap();
        let finished = running.finish(MOMENT);
        assert_eq!(finished.status, Some(9), "{name}");
        assert_eq!(finished.stdout, format!("ready\ngot {name}\n"));
    }
}

#[test]
fn command_inherits_signal_dispositions_of_launcher() {
    require!(Need::Guests);
    let lab = Lab::new();
    let look = "grep -E '^Sig(Blk|Ign)' /proc/self/status";
    // The C library of this program itself changes the real-time signals.
    let masks = |text: String| -> Vec<u64> {
        let words = text.split_whitespace().filter(|word| !word.starts_with("Sig"));
        words.map(|word| u64::from_str_radix(word, 16).unwrap() & 0x7fff_ffff).collect()
    };
    let inside = masks(lab.script("-q", look).succeed(MOMENT));
    let outside = masks(lab.spawn(&["sh", "-ec", look]).succeed(MOMENT));
    assert_eq!(inside, outside);
    let ringfence = env!("CARGO_BIN_EXE_ringfence");
    let script =
        format!("trap '' HUP; exec {ringfence} run -q -- sh -c 'echo up; sleep 1; echo on'");
    let ignores = lab.spawn(&["sh", "-ec", &script]);
    ignores.wait_for_output("up");
    kill_process(ignores.pid(), Signal::HUP).unwrap();
    assert_eq!(ignores.succeed(MOMENT), "up\non\n");
}

#[test]
fn guest_of_a_caller_that_ignores_its_children_ends_and_is_stopped() {
    require!(Need::Guests);
    let lab = Lab::new();
    let ignoring = ["env", "--ignore-signal=CHLD,PIPE"];
    let look = "grep SigIgn /proc/self/status";
    let masks = |text: String| -> u64 {
        u64::from_str_radix(text.trim().trim_start_matches("SigIgn:").trim(), 16).unwrap()
    };
    let own = lab.start("-q", &["sh", "-c", &format!("{look}; exit 3")], &ignoring);
    let own = own.finish(MOMENT);
    assert_eq!(own.status, Some(3), "{}", own.stderr);
    let plain = lab.spawn(&[&ignoring[..], &["sh", "-c", look]].concat()).succeed(MOMENT);
    // The C library of this program itself changes the real-time signals.
    assert_eq!(masks(own.stdout) & 0x7fff_ffff, masks(plain) & 0x7fff_ffff);
    let stopped = lab.start("-q", &["sh", "-c", "echo up; exec sleep 600"], &ignoring);
    stopped.wait_for_output("up");
    assert_eq!(stopped.end().status, Some(143));
}

#[test]
fn writer_to_a_closed_pipe_sees_the_error_only_if_its_caller_ignores_the_signal() {
    require!(Need::Guests);
    let lab = Lab::new();
    let writer = "sleep 0.5; echo x; echo status $? >&2";
    let run = format!("{} run -q --uplink none --switch none", lab.program());
    for (wrapper, expected) in [("", ""), ("env --ignore-signal=PIPE", "status 1\n")] {
        let script = format!("{wrapper} {run} -- sh -c '{writer}' 2>said | true");
        lab.spawn(&["sh", "-c", &script]).succeed(MOMENT);
        let said = lab.read("said");
        assert!(
            said.ends_with(expected) && said.contains("status") != expected.is_empty(),
            "{said}"
        );
    }
}

#[test]
fn script_without_an_interpreter_line_is_run_by_a_shell() {
    require!(Need::Guests);
    let lab = Lab::new();
    std::fs::write(lab.file("plain"), "echo \"plain $1\"; exit 5").unwrap();
    std::fs::set_permissions(lab.file("plain"), PermissionsExt::from_mode(0o755)).unwrap();
    for command in [["./plain", "one"], ["plain", "one"]] {
        let script = format!(
            "PATH=$PWD:$PATH exec {} run -q --uplink none --switch none -- {}",
            lab.program(),
            command.join(" ")
        );
        let finished = lab.spawn(&["sh", "-c", &script]).finish(MOMENT);
        assert_eq!(finished.status, Some(5), "{}", finished.stderr);
        assert_eq!(finished.stdout, "plain one\n");
    }
}

#[test]
fn orphan_is_reaped_and_ends_with_command() {
    require!(Need::Guests);
    let lab = Lab::new();
    // A process whose parent ends first, twice: one ends early, and one continues.
    let script = "(sh -c 'sleep 0.1; touch early' &); (sleep 1000 &); \
                  is_settled() { cat /proc/[0-9]*/stat > all 2>/dev/null && test $(grep -c '(sleep)' all) = 1 && ! grep -q ') Z ' all; }; \
                  until test -e early && is_settled; do sleep 0.05; done; echo ready; read line < gate";
    make_pipe(&lab, "gate");
    let running = lab.script("-q", script);
    running.wait_for_output("ready");
    let all = lab.read("all");
    assert!(all.lines().all(|line| !line.contains(") Z ")), "{all}");
    assert_eq!(all.lines().filter(|line| line.contains("(sleep)")).count(), 1, "{all}");
    let processes = running.processes();
    assert!(processes.iter().any(|process| process.arguments[0] == "sleep"));
    std::fs::write(lab.file("gate"), "go\n").unwrap();
    running.succeed(MOMENT);
    assert_gone(&processes);
    lab.assert_no_switch();
}

fn assert_gone(processes: &[Process]) {
    let left = || processes.iter().filter(|process| process.is_alive()).collect::<Vec<_>>();
    assert!(eventually(GONE_WITHIN, || left().is_empty()), "left: {:?}", left());
}

/// Roles of the process to kill, the expected status, and a part of the expected message.
const KILLS: &[(&str, i32, &str)] = &[
    ("command", 137, "the command was killed by signal 9 (SIGKILL)"),
    ("guest-init", 125, "the guest's init was killed by signal 9 (SIGKILL); this guest ends"),
    ("supervisor guest-init", 125, "the supervisor of the guest's init was killed by signal 9"),
    ("frontend", 125, "the frontend was killed by signal 9 (SIGKILL); this guest ends"),
    ("supervisor frontend", 125, "the supervisor of the frontend was killed by signal 9"),
    ("driver", 125, "the driver domain of switch `default` was killed by signal 9 (SIGKILL)"),
    ("supervisor driver", 125, "the driver domain of switch `default` is gone"),
    ("launcher", -9, ""),
];

#[test]
fn kill_of_any_process_leaves_nothing_and_reports_reason() {
    require!(Need::Guests);
    let lab = Lab::new();
    for (role, status, words) in KILLS {
        let running = lab.script("--name victim", "echo up; sleep 1000");
        running.wait_for_output("up");
        let processes = running.processes();
        let since = Instant::now();
        find(&running, &processes, role).signal(Signal::KILL);
        let finished = running.finish(MOMENT);
        assert_eq!(finished.status, Some(*status), "{role}: {}", finished.stderr);
        assert!(finished.stderr.contains(words), "{role}: {}", finished.stderr);
        assert_gone(&processes);
        lab.assert_no_switch();
        assert!(since.elapsed() < GONE_WITHIN, "{role}: it took {:?}", since.elapsed());
    }
}

#[test]
fn later_guest_reports_end_of_driver_domain() {
    require!(Need::Guests);
    let lab = Lab::new();
    let first = lab.script("--name first", "echo up; sleep 1000");
    first.wait_for_output("up");
    let second = lab.script("--name second", "echo up; sleep 1000");
    second.wait_for_output("up");
    let processes = [first.processes(), second.processes()].concat();
    first.inner("driver").signal(Signal::KILL);
    for guest in [first, second] {
        let finished = guest.finish(MOMENT);
        let words = "the driver domain of switch `default` was killed by signal 9 (SIGKILL)";
        assert_eq!(finished.status, Some(125));
        assert!(finished.stderr.contains(words), "{}", finished.stderr);
    }
    assert_gone(&processes);
    lab.assert_no_switch();
    // A new switch of the same name can be created at once.
    assert_eq!(lab.script("-q", "exit 3").finish(MOMENT).status, Some(3));
}

#[test]
fn end_of_one_guest_leaves_other_guest_running() {
    require!(Need::Guests);
    let lab = Lab::new();
    let first = lab.script("--name first", "echo up; sleep 1000");
    first.wait_for_output("up");
    let mut second = lab.script("--name second", "echo up; sleep 1000");
    second.wait_for_output("up");
    let driver = first.inner("driver");
    // The second guest needs the driver domain and its supervisor.
    let stays = |process: &Process| {
        process.pid == driver.pid || process.pid.as_raw_nonzero().get() == driver.parent
    };
    let processes: Vec<Process> = first.processes().into_iter().filter(|p| !stays(p)).collect();
    first.inner("frontend").signal(Signal::KILL);
    assert_eq!(first.finish(MOMENT).status, Some(125));
    assert_gone(&processes);
    assert!(second.is_running() && driver.is_alive());
    // The name of the ended guest is free again.
    assert_eq!(lab.script("-q --name first", "exit 4").finish(MOMENT).status, Some(4));
    assert_eq!(second.end().status, Some(143));
    lab.assert_no_switch();
}

fn find(running: &Running, processes: &[Process], role: &str) -> Process {
    if let Some(role) = role.strip_prefix("supervisor ") {
        let inner = find(running, processes, role);
        let supervisor = processes.iter().find(|process| {
            process.pid.as_raw_nonzero().get() == inner.parent && process.pid != running.pid()
        });
        return supervisor.unwrap_or_else(|| panic!("no supervisor of {role}")).clone();
    }
    let found = processes.iter().find(|process| match role {
        "launcher" => process.pid == running.pid(),
        // The shell of the script. The words of init contain the same ones further behind.
        "command" => process.arguments.first().is_some_and(|word| word == "sh"),
        role => process.arguments.join(" ").starts_with(&format!("ringfence internal {role}")),
    });
    found.unwrap_or_else(|| panic!("no {role} in {processes:?}")).clone()
}

#[test]
fn ordinary_user_can_run_all_command_tests() {
    require!(Need::Guests, Need::Root);
    // User id that no program has.
    const USER: u32 = 12345;
    let tun = std::path::Path::new("/dev/net/tun");
    if tun.metadata().unwrap().permissions().mode() & 0o006 != 0o006 {
        // udev sets the same mode.
        std::fs::set_permissions(tun, PermissionsExt::from_mode(0o666)).unwrap();
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let program = directory.path().join("ringfence");
    crate::support::users::copy_program(&program);
    let session = directory.path().join("session");
    std::fs::create_dir(&session).unwrap();
    std::os::unix::fs::chown(&session, Some(USER), Some(USER)).unwrap();
    let run = |script: &str| {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(&program);
        command
            .args(["run", "--uplink", "none", "--", "sh", "-ec", script])
            .uid(USER)
            .gid(USER)
            .current_dir("/");
        command.env("XDG_RUNTIME_DIR", &session).output().unwrap()
    };
    let output = run("id -u; cat /proc/self/uid_map; ls /sys/class/net; exit 6");
    let (said, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(6), "{errors}");
    let words: Vec<&str> = said.split_whitespace().collect();
    // The innermost of nested namespaces, in which the user has the own id again.
    let user = USER.to_string();
    assert_eq!(words, [&user, &user, "0", "1", "eth0", "lo"], "{errors}");
    // The guest may write to its own files and not to root's.
    let home = directory.path().join("home");
    std::fs::create_dir(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(USER), Some(USER)).unwrap();
    let script = format!("touch /run/x 2>/dev/null || echo refused; touch {}/mine", home.display());
    let output = run(&script);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "refused\n");
    use std::os::unix::fs::MetadataExt;
    assert_eq!(home.join("mine").metadata().unwrap().uid(), USER);
    let sockets = || std::fs::read_dir(session.join("ringfence")).unwrap().count();
    assert!(eventually(GONE_WITHIN, || sockets() == 0));
}
