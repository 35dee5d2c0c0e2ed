//! `ringfence top` as tables, as JSON and as a live view.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{LocalModes, tcgetattr};
use serde_json::Value;

use crate::require;
use crate::support::needs::Need;
use crate::support::screen::{SETSID, Screen};
use crate::support::{Lab, MOMENT, Running, eventually};

const RINGFENCE: &str = env!("CARGO_BIN_EXE_ringfence");
/// Switches to the screen of before, with a cursor.
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// Starts `web`, and `client`, which sends to it all the time.
fn guests(lab: &Lab) -> [Running; 2] {
    let web = lab.run("--name web --switch blue --address 10.9.8.7/24", &["sleep", "1000"]);
    web.wait_up();
    let script = "while :; do (echo x > /dev/udp/10.9.8.7/9) 2>/dev/null; sleep 0.02; done";
    let options = "--name client --switch blue --address 10.9.8.8/24";
    let client = lab.run(options, &["bash", "-c", script]);
    client.wait_up();
    [web, client]
}

fn top(lab: &Lab, options: &[&str]) -> String {
    let words = [&[lab.program(), "top", "--interval", "0.3"], options].concat();
    lab.spawn(&words).succeed(Duration::from_secs(30))
}

/// Returns the item of that kind and name.
fn item<'a>(all: &'a Value, kind: &str, name: &str) -> &'a Value {
    let items = all["items"].as_array().unwrap();
    let found = items.iter().find(|item| item["kind"] == kind && item["name"] == name);
    found.unwrap_or_else(|| panic!("{kind} {name}: {all:#}"))
}

#[test]
fn top_without_terminal_prints_the_rates_of_one_interval() {
    require!(Need::Guests, Need::Program("bash", "bash"));
    let lab = Lab::new();
    let guests = guests(&lab);
    let mut all = Value::Null;
    let sends = || {
        all = serde_json::from_str(&top(&lab, &["--json"])).unwrap();
        item(&all, "guest", "client")["rates"]["sent_bytes"].as_f64() > Some(0.0)
    };
    assert!(eventually(MOMENT, sends), "the guest sends");
    let client = item(&all, "guest", "client");
    assert_eq!(client["place"], "blue");
    assert!(client["levels"]["pages_lent"].as_u64() > Some(0), "{client:#}");
    let vifs = all["items"].as_array().unwrap().iter().filter(|item| item["kind"] == "vif");
    let vif = vifs.clone().find(|vif| vif["guest"] == "client").unwrap();
    assert_eq!(vifs.count(), 2, "{all:#}");
    assert!(vif["counters"]["rx_frames"].as_u64() > Some(0), "{vif:#}");
    assert!(vif["levels"]["buffers_posted"].as_u64() > Some(0), "{vif:#}");
    let driver = item(&all, "driver", "blue");
    assert_eq!(driver["levels"]["guests"], 2);
    assert!(driver["counters"]["grant_copies"].as_u64() > Some(0), "{driver:#}");
    let text = top(&lab, &[]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("GUEST ") && lines[0].ends_with("SWITCH"), "{text}");
    assert!(lines[1].starts_with("client ") && lines[2].starts_with("web "), "{text}");
    assert!(text.contains("\nVIF ") && text.contains("\nDRIVER "), "{text}");
    assert!(!text.contains('\x1b'), "{text:?}");
    drop(guests.map(Running::end));
    assert_eq!(top(&lab, &[]), "no guests\n");
}

/// Returns the lines that a terminal of this size shows after the output.
fn shown(output: &str, width: usize, height: usize) -> String {
    let mut cells = vec![vec![' '; width]; height];
    let (mut line, mut column) = (0, 0);
    let mut rest = output;
    while let Some(c) = rest.chars().next() {
        if let Some(sequence) = rest.strip_prefix("\x1b[") {
            let end = sequence.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(0);
            let (parameters, last) = (&sequence[..end], &sequence[end..]);
            match (last.chars().next(), parameters.split_once(';')) {
                (Some('H'), Some((y, x))) => {
                    (line, column) =
                        (y.parse::<usize>().unwrap() - 1, x.parse::<usize>().unwrap() - 1);
                }
                (Some('J'), _) => cells.iter_mut().for_each(|line| line.fill(' ')),
                _ => {}
            }
            rest = last.get(1..).unwrap_or_default();
            continue;
        }
        if let Some(cell) = cells.get_mut(line).and_then(|cells| cells.get_mut(column)) {
            *cell = c;
        }
        column += 1;
        rest = &rest[c.len_utf8()..];
    }
    cells.iter().map(|line| line.iter().collect::<String>().trim_end().to_owned() + "\n").collect()
}

/// Waits until a terminal of 24 lines shows the text.
fn wait_for(screen: &Screen, width: usize, text: &str) {
    let is_there = || shown(&screen.said.text(), width, 24).contains(text);
    assert!(eventually(MOMENT, is_there), "{text:?}: {}", shown(&screen.said.text(), width, 24));
}

fn start(lab: &Lab, interval: &str) -> Screen {
    let words = ["TERM=xterm", RINGFENCE, "top", "--interval", interval];
    let screen = Screen::start(lab, &words);
    screen.resize(80);
    screen
}

#[test]
fn live_view_follows_keys_and_restores_the_terminal() {
    require!(Need::Guests, Need::Program("bash", "bash"), SETSID);
    let lab = Lab::new();
    let guests = guests(&lab);
    let mut screen = start(&lab, "0.2");
    wait_for(&screen, 80, " 1 guests 2  2 vifs 2 ");
    wait_for(&screen, 80, "\n>client ");
    assert!(!tcgetattr(&screen.keyboard).unwrap().local_modes.contains(LocalModes::ECHO));
    screen.press("j\r");
    wait_for(&screen, 80, "guest web (blue)\n");
    screen.press("\x1b");
    wait_for(&screen, 80, "\n>web ");
    screen.press("/clie\r");
    wait_for(&screen, 80, "filter clie");
    wait_for(&screen, 80, "\n>client ");
    screen.press("2");
    screen.resize(120);
    wait_for(&screen, 120, "\n>vif");
    screen.press("q");
    let (said, keyboard) = (screen.said.clone(), screen.keyboard.try_clone().unwrap());
    assert_eq!(screen.finish(), 0);
    assert!(eventually(MOMENT, || said.text().ends_with(LEAVE)), "{:?}", said.text());
    assert!(tcgetattr(&keyboard).unwrap().local_modes.contains(LocalModes::ECHO));
    drop(guests.map(Running::end));
}

#[test]
fn signal_ends_the_live_view_and_restores_the_terminal() {
    require!(SETSID);
    let lab = Lab::new();
    for (signal, status) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        let screen = start(&lab, "60");
        wait_for(&screen, 80, "no guests");
        kill_process(Pid::from_child(&screen.session), signal).unwrap();
        let (said, keyboard) = (screen.said.clone(), screen.keyboard.try_clone().unwrap());
        assert_eq!(screen.finish(), status);
        // The terminal's text is read by another thread.
        assert!(
            eventually(MOMENT, || said.text().ends_with(LEAVE)),
            "{signal:?}: {:?}",
            said.text()
        );
        assert!(tcgetattr(&keyboard).unwrap().local_modes.contains(LocalModes::ECHO), "{signal:?}");
    }
}
