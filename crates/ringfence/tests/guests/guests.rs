//! `ringfence ps`, `exec`, `logs`, `status` and `stop`: guests are found by name, run further commands and end on request. Neither another
//! user nor the command of a guest reaches the socket behind them.

use std::os::unix::fs::MetadataExt;

use rustix::process::Signal;

use crate::require;
use crate::support::needs::Need;
use crate::support::{Finished, Lab, MOMENT, Running, eventually};

/// User id of nobody else's.
const OTHER_USER: &str = "65533";

fn command(lab: &Lab, words: &[&str]) -> Finished {
    let words: Vec<&str> = [lab.program()].into_iter().chain(words.iter().copied()).collect();
    lab.spawn(&words).finish(MOMENT)
}

/// Starts a guest that sleeps, and waits until `ps` shows it.
fn sleeper(lab: &Lab, name: &str) -> Running {
    let guest = lab.run(&format!("--name {name} --switch none"), &["sleep", "1000"]);
    let listed = || command(lab, &["ps"]).stdout.contains(name);
    assert!(eventually(MOMENT, listed), "{}", command(lab, &["ps"]).stdout);
    guest
}

fn listed(lab: &Lab) -> serde_json::Value {
    let finished = command(lab, &["ps", "--json"]);
    assert_eq!(finished.status, Some(0), "{}", finished.stderr);
    serde_json::from_str(&finished.stdout).unwrap()
}

#[test]
fn ps_lists_guests_while_their_commands_run() {
    require!(Need::Guests);
    let lab = Lab::new();
    assert_eq!(listed(&lab), serde_json::json!([]));
    let web = lab.run("-q --name web --switch blue --address 10.9.8.7/24", &["sleep", "1000"]);
    assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web"));
    let other = sleeper(&lab, "other");
    let guests = listed(&lab);
    assert_eq!(guests[0]["switch"], "blue");
    assert_eq!(guests[0]["addresses"], serde_json::json!(["10.9.8.7/24"]));
    assert_eq!(guests[0]["command"], serde_json::json!(["sleep", "1000"]));
    assert!(guests[0]["memory"].as_u64().unwrap() > 0);
    assert_eq!(guests[1]["name"], "other");
    assert_eq!(guests[1]["switch"], serde_json::Value::Null);
    assert_eq!(guests[1]["pid"].as_i64(), Some(other.pid().as_raw_nonzero().get().into()));
    let table = command(&lab, &["ps"]).stdout;
    assert!(table.starts_with("NAME") && table.lines().count() == 3, "{table}");
    // Neither an end on request nor one by a kill leaves a guest in the list.
    web.end();
    rustix::process::kill_process(other.pid(), Signal::KILL).unwrap();
    other.finish(MOMENT);
    assert!(eventually(MOMENT, || listed(&lab) == serde_json::json!([])));
    lab.assert_no_switch();
}

#[test]
fn exec_runs_a_command_with_network_and_streams_of_the_guest() {
    require!(Need::Guests, Need::Program("ip", "iproute2"));
    let lab = Lab::new();
    let guest = lab.script(
        "-q --name web --switch blue --address 10.9.8.7/24",
        "hostname > host; touch up; sleep 1000",
    );
    assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web" && lab.file("up").exists()));
    let shown = command(&lab, &["exec", "web", "--", "ip", "-br", "address", "show", "eth0"]);
    assert_eq!(shown.status, Some(0), "{}", shown.stderr);
    assert!(shown.stdout.contains("10.9.8.7/24"), "{}", shown.stdout);
    let script = "hostname; cat; echo error >&2; exit 7";
    let words =
        format!("echo input | {} exec web -- sh -c '{script}'; echo status $?", lab.program());
    let finished = lab.spawn(&["sh", "-c", &words]).finish(MOMENT);
    let host = lab.read("host");
    assert_eq!(finished.stdout, format!("{host}input\nstatus 7\n"), "{}", finished.stderr);
    assert_eq!(finished.stderr, "error\n");
    drop(guest.end());
    lab.assert_no_switch();
}

#[test]
fn exec_returns_the_status_of_a_shell_for_what_cannot_run() {
    require!(Need::Guests);
    let lab = Lab::new();
    let guest = sleeper(&lab, "web");
    for (words, status, why) in [
        (&["exec", "web", "--", "no-such-command"][..], 127, "no-such-command: command not found"),
        (&["exec", "web", "--", "sh", "-c", "kill -9 $$"], 137, ""),
        (&["exec", "nobody", "--", "true"], 125, "no guest of yours is called `nobody`"),
        (&["exec", "--no-such-option", "web"], 125, "unexpected argument"),
        (&["run", "--no-such-option"], 125, "unexpected argument"),
        (&["ps", "--no-such-option"], 2, "unexpected argument"),
    ] {
        let finished = command(&lab, words);
        assert_eq!(finished.status, Some(status), "{words:?}: {}", finished.stderr);
        assert!(finished.stderr.contains(why), "{words:?}: {}", finished.stderr);
    }
    guest.end();
}

#[test]
fn signals_reach_the_command_of_exec_and_its_client_ends_with_the_guest() {
    require!(Need::Guests);
    let lab = Lab::new();
    let guest = sleeper(&lab, "web");
    let script = "trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let client = lab.spawn(&[lab.program(), "exec", "web", "--", "sh", "-c", script]);
    client.wait_for_output("ready");
    let finished = client.end();
    assert_eq!((finished.status, finished.stdout.as_str()), (Some(9), "ready\ncaught\n"));
    // A client that is killed takes its command with it.
    let script = "trap 'touch hung-up; exit' HUP; echo ready; while :; do sleep 0.05; done";
    let client = lab.spawn(&[lab.program(), "exec", "web", "--", "sh", "-c", script]);
    client.wait_for_output("ready");
    rustix::process::kill_process(client.pid(), Signal::KILL).unwrap();
    assert!(eventually(MOMENT, || lab.file("hung-up").exists()));
    client.finish(MOMENT);
    let client = lab.spawn(&[lab.program(), "exec", "web", "--", "sleep", "1000"]);
    assert!(eventually(MOMENT, || guest.processes().iter().any(|p| p.is_role("guest-init"))));
    std::thread::sleep(std::time::Duration::from_millis(200));
    guest.end();
    let finished = client.finish(MOMENT);
    assert_eq!(finished.status, Some(137), "{}", finished.stderr);
}

#[test]
fn stop_ends_a_guest_and_kills_a_command_that_ignores_it() {
    require!(Need::Guests);
    let lab = Lab::new();
    let polite = sleeper(&lab, "polite");
    let stubborn = lab.script(
        "-q --name stubborn --switch none",
        "trap '' TERM; touch up; while :; do sleep 0.1; done",
    );
    assert!(eventually(MOMENT, || lab.file("up").exists()));
    assert_eq!(command(&lab, &["stop", "polite"]).status, Some(0));
    assert_eq!(polite.finish(MOMENT).status, Some(143));
    assert_eq!(command(&lab, &["stop", "--time", "1", "stubborn"]).status, Some(0));
    assert_eq!(stubborn.finish(MOMENT).status, Some(137));
    let finished = command(&lab, &["stop", "polite"]);
    assert_eq!(finished.status, Some(125));
    assert!(finished.stderr.contains("ringfence ps"), "{}", finished.stderr);
}

#[test]
fn logs_have_steps_of_a_quiet_guest_and_the_reason_of_its_end() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let lab = Lab::new();
    let guest = lab.run("-q --name web --switch blue", &["sleep", "1000"]);
    assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web"));
    let logs = command(&lab, &["logs", "web"]);
    assert_eq!((logs.status, logs.stderr.as_str()), (Some(0), ""));
    for text in ["launcher: switch `blue` is new", "launcher: web is on switch `blue`"] {
        assert!(logs.stdout.contains(text), "{}", logs.stdout);
    }
    let last = command(&lab, &["logs", "--json", "-n", "1", "web"]).stdout;
    let last: serde_json::Value = serde_json::from_str(&last).unwrap();
    assert_eq!(last["source"], "launcher");
    assert_eq!(last["number"].as_u64(), Some(logs.stdout.lines().count() as u64), "{last}");
    // A connection that is no launcher's, which the driver domain reports.
    let attack = "
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
s.send(b'\"Stats\"')
s.recv(1 << 16)";
    let socket = lab.runtime_dir().join("blue.sock");
    let follower = lab.spawn(&[lab.program(), "logs", "--follow", "-n", "0", "web"]);
    lab.spawn(&["python3", "-c", attack, socket.to_str().unwrap()]).succeed(MOMENT);
    follower.wait_for_output("driver domain: ");
    rustix::process::kill_process(guest.inner("frontend").pid, Signal::KILL).unwrap();
    assert_eq!(guest.finish(MOMENT).status, Some(125));
    let followed = follower.finish(MOMENT);
    assert_eq!(followed.status, Some(0), "{}", followed.stderr);
    let reason = "launcher: the frontend was killed by signal 9 (SIGKILL); this guest ends with it";
    assert!(followed.stdout.trim_end().ends_with(reason), "{}", followed.stdout);
    let gone = command(&lab, &["logs", "web"]);
    assert_eq!(gone.status, Some(125));
    assert!(gone.stderr.contains("no guest of yours is called `web`"), "{}", gone.stderr);
    lab.assert_no_switch();
}

#[test]
fn status_of_a_guest_has_its_counters_and_no_neighbour_s() {
    require!(Need::Guests);
    let lab = Lab::new();
    let server = lab.run("-q --name web --switch blue --address 10.9.8.7/24", &["sleep", "1000"]);
    assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web"));
    let script = "(echo x > /dev/udp/10.9.8.7/9) 2>/dev/null || true; touch sent; sleep 1000";
    let client = lab.run("-q --name client --switch blue --mode staging", &["bash", "-c", script]);
    assert!(eventually(MOMENT, || lab.file("sent").exists()));
    let status = |name: &str| -> serde_json::Value {
        let finished = command(&lab, &["status", name, "--json"]);
        assert_eq!(finished.status, Some(0), "{}", finished.stderr);
        serde_json::from_str(&finished.stdout).unwrap()
    };
    let counted = || status("web")["counters"]["ports"].to_string().contains("tx_bytes");
    assert!(eventually(MOMENT, counted), "{}", status("web"));
    let (web, other) = (status("web"), status("client"));
    assert_eq!((&web["name"], &web["switch"]), (&"web".into(), &"blue".into()));
    let ports = |status: &serde_json::Value| -> Vec<String> {
        status["counters"]["ports"].as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!((ports(&web).len(), ports(&other).len()), (1, 1));
    assert_ne!(ports(&web), ports(&other));
    let table = command(&lab, &["status", "web", "--counters"]).stdout;
    assert!(table.contains("sent to the switch") && table.contains("rx_frames"), "{table}");
    // The machine decides about huge pages; a guest in mode `copy` has none.
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let allowed = setting.is_ok_and(|text| !text.contains("[never]") && !text.contains("[deny]"));
    let expected = if allowed { "huge" } else { "small" };
    assert_eq!((&web["pages"], &other["pages"]), (&"small".into(), &expected.into()));
    assert!(table.contains("lent memory:    pages of 4 KiB\n"), "{table}");
    // Without a driver domain there is nothing to count.
    let alone = sleeper(&lab, "alone");
    assert_eq!(status("alone")["counters"]["ports"], serde_json::json!({}));
    let daemon = command(&lab, &["status", "--socket", "no-such-socket"]);
    assert!(daemon.stderr.contains("ringfence status GUEST"), "{}", daemon.stderr);
    drop((server.end(), client.end(), alone.end()));
    lab.assert_no_switch();
}

#[test]
fn another_user_and_a_command_in_a_guest_do_not_reach_a_guest() {
    require!(
        Need::Guests,
        Need::Root,
        Need::Program("python3", "python3"),
        Need::Program("setpriv", "util-linux")
    );
    let lab = Lab::new();
    let guest = sleeper(&lab, "web");
    // The attacker knows the name of the socket and the protocol.
    let attack = "
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(10)
got = b''
try:
    s.connect('\\0' + sys.argv[1])
    s.send(b'\"Describe\"')
    got = s.recv(1 << 16)
except OSError as error:
    print(type(error).__name__)
print('got', len(got))";
    let directory = std::fs::metadata(lab.runtime_dir()).unwrap();
    let prefix = format!("ringfence-guest-{:x}-{:x}-", directory.dev(), directory.ino());
    let list = std::fs::read_to_string("/proc/net/unix").unwrap();
    let name =
        list.lines().find_map(|line| line.split_once(" @").filter(|of| of.1.starts_with(&prefix)));
    let name = name.unwrap().1;
    let own = lab.spawn(&["python3", "-c", attack, name]).succeed(MOMENT);
    assert!(!own.contains("got 0"), "{own}");
    // The user may not enter root's own directories.
    let path = "PATH=/usr/bin:/bin:/usr/sbin:/sbin";
    let other = [
        "env",
        path,
        "setpriv",
        "--reuid",
        OTHER_USER,
        "--clear-groups",
        "python3",
        "-c",
        attack,
        name,
    ];
    let other = lab.spawn(&other).succeed(MOMENT);
    assert!(other.contains("got 0") && !other.contains("Refused"), "{other}");
    let inside = lab.run("-q --switch none", &["python3", "-c", attack, name]).succeed(MOMENT);
    assert!(inside.contains("ConnectionRefusedError") && inside.contains("got 0"), "{inside}");
    guest.end();
}

#[test]
fn wait_returns_once_guest_runs_and_once_it_listens() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let lab = Lab::new();
    // The guest does not exist yet.
    let waiting = lab.spawn(&[lab.program(), "wait", "web"]);
    let for_port = lab.spawn(&[lab.program(), "wait", "--for", "port", "8000", "web"]);
    let guest = lab.script(
        "-q --name web --switch none",
        "until [ -e go ]; do sleep 0.01; done; exec python3 -m http.server 8000",
    );
    assert_eq!(waiting.succeed(MOMENT), "");
    // Whoever waited for the guest finds it.
    assert_eq!(command(&lab, &["status", "web"]).status, Some(0));
    let early = command(&lab, &["wait", "web", "--for", "port", "8000", "--timeout", "0"]);
    assert_eq!(early.status, Some(1));
    assert!(early.stderr.contains("`web` does not listen at port 8000"), "{}", early.stderr);
    std::fs::write(lab.file("go"), "").unwrap();
    for_port.succeed(MOMENT);
    let other = command(&lab, &["wait", "web", "--for", "port", "8001", "--timeout", "0"]);
    assert_eq!(other.status, Some(1));
    assert!(other.stderr.contains("it listens at 8000"), "{}", other.stderr);
    // A guest that ends while somebody waits is not waited for any longer.
    let waiting = lab.spawn(&[lab.program(), "wait", "web", "--for", "port", "8001"]);
    assert_eq!(command(&lab, &["stop", "web"]).status, Some(0));
    let ended = waiting.finish(MOMENT);
    assert_eq!(ended.status, Some(1));
    guest.finish(MOMENT);
}

#[test]
fn wait_for_a_guest_that_never_comes_has_status_1_and_errors_of_usage_125() {
    let lab = Lab::new();
    let late = command(&lab, &["wait", "web", "--timeout", "0"]);
    assert_eq!(late.status, Some(1));
    assert!(late.stderr.contains("no guest called `web`"), "{}", late.stderr);
    for words in [&["wait"][..], &["wait", "web", "--for", "rain"], &["wait", "--nosuch"]] {
        let refused = command(&lab, words);
        assert_eq!(refused.status, Some(125), "{words:?}: {}", refused.stderr);
    }
    let unknown = command(&lab, &["status", "web"]);
    assert_eq!(unknown.status, Some(125));
    assert!(unknown.stderr.contains("`ringfence wait web`"), "{}", unknown.stderr);
}
