//! Headless Chromium, driven by its debugging protocol.
//!
//! The protocol's messages are JSON with a zero byte behind each. With `--remote-debugging-pipe` Chromium reads them from
//! descriptor 3 and writes to descriptor 4; a shell makes these of its standard input and output. The browser has a
//! network namespace of its own without an interface, so it reaches files alone.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

/// Starts Chromium with the descriptors of its protocol.
const SHELL: &str = "exec 3<&0 4>&1 </dev/null >/dev/null; exec \"$@\"";

/// Reads the page's measures. Text has the contrast of its colour to the first opaque background behind it.
const MEASURE: &str = include_str!("measure.js");

/// Size and colours of a screen.
#[derive(Clone, Copy)]
pub struct Screen {
    pub width: u32,
    pub height: u32,
    pub is_dark: bool,
}

/// Browser with one page, ended on drop.
pub struct Browser {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    session: String,
    number: u64,
    events: VecDeque<Value>,
    errors: Vec<String>,
}

impl Browser {
    /// Starts the browser with its profile in a directory.
    pub fn start(directory: &Path) -> Browser {
        let profile = format!("--user-data-dir={}", directory.join("profile").display());
        let mut child = Command::new("unshare")
            .args(["--user", "--map-root-user", "--net", "sh", "-c", SHELL, "sh", "chromium"])
            // The sandbox of the browser needs a user that is not root, and the page is ours.
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--remote-debugging-pipe", &profile, "about:blank"])
            .env("HOME", directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let output = BufReader::new(output);
        let (session, events, errors) = (String::new(), VecDeque::new(), Vec::new());
        let mut browser = Browser { child, input, output, session, number: 0, events, errors };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attach);
        browser.session = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Log", "Accessibility"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Shows a page and returns its measures.
    pub fn show(&mut self, page: &Path, screen: Screen) -> Value {
        let Screen { width, height, is_dark } = screen;
        self.errors.clear();
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = if is_dark { "dark" } else { "light" };
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
        let went = self.call("Page.navigate", json!({"url": format!("file://{}", page.display())}));
        assert!(went.get("errorText").is_none(), "{went}");
        self.event("Page.loadEventFired");
        self.evaluate(MEASURE)
    }

    /// Returns the errors of the console and the exceptions since the page was shown.
    pub fn errors(&self) -> &[String] {
        &self.errors
    }

    /// Returns roles and names of the page as a screen reader has them.
    pub fn accessible(&mut self) -> Vec<(String, String)> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}));
        let nodes =
            tree["nodes"].as_array().unwrap().iter().filter(|node| node["ignored"] == false);
        let text = |node: &Value, field: &str| {
            node[field]["value"].as_str().unwrap_or_default().to_owned()
        };
        nodes.map(|node| (text(node, "role"), text(node, "name"))).collect()
    }

    /// Presses the tabulator key. Returns element and name of the new stop.
    pub fn tab(&mut self) -> String {
        self.key("Tab", "");
        let stop =
            "(e => e.localName + ': ' + (e.ariaLabel || e.textContent))(document.activeElement)";
        self.evaluate(stop).as_str().unwrap().to_owned()
    }

    /// Presses a key that writes `text`.
    pub fn key(&mut self, key: &str, text: &str) {
        let code = if key == "Tab" { 9 } else { 13 };
        for kind in ["keyDown", "keyUp"] {
            let press = json!({"type": kind, "key": key, "code": key, "text": text, "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", press);
        }
    }

    /// Writes a picture of the whole page to a file.
    pub fn picture(&mut self, path: &Path) {
        let picture = self.call("Page.captureScreenshot", json!({"captureBeyondViewport": true}));
        std::fs::write(path, base64(picture["data"].as_str().unwrap())).unwrap();
    }

    fn evaluate(&mut self, expression: &str) -> Value {
        let order = json!({"expression": expression, "returnByValue": true});
        let found = self.call("Runtime.evaluate", order);
        assert!(found.get("exceptionDetails").is_none(), "{found}");
        found["result"]["value"].clone()
    }

    /// Calls a method and returns its result.
    fn call(&mut self, method: &str, params: Value) -> Value {
        self.number += 1;
        let mut message = json!({"id": self.number, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.as_str().into();
        }
        self.input.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let message = self.receive();
            if message["id"] == self.number {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
            self.events.push_back(message);
        }
    }

    /// Waits for an event.
    fn event(&mut self, method: &str) {
        while let Some(event) = self.events.pop_front() {
            if event["method"] == method {
                return;
            }
        }
        while self.receive()["method"] != method {}
    }

    fn receive(&mut self) -> Value {
        let mut bytes = Vec::new();
        self.output.read_until(0, &mut bytes).unwrap();
        assert_eq!(bytes.pop(), Some(0), "the browser ended");
        let message: Value = serde_json::from_slice(&bytes).unwrap();
        let params = &message["params"];
        match message["method"].as_str().unwrap_or_default() {
            "Runtime.exceptionThrown" => self.errors.push(params.to_string()),
            "Runtime.consoleAPICalled" if params["type"] == "error" => {
                self.errors.push(params.to_string())
            }
            "Log.entryAdded" if params["entry"]["level"] == "error" => {
                self.errors.push(params.to_string())
            }
            _ => {}
        }
        message
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser ends with its protocol; its processes with it.
        let _ = self.input.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        let _ = self.child.wait();
    }
}

/// Decodes a picture, which the protocol sends as base 64.
fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text.bytes().filter_map(|byte| DIGITS.iter().position(|digit| *digit == byte));
    let (mut bits, mut have, mut bytes) = (0usize, 0, Vec::new());
    for digit in digits {
        (bits, have) = ((bits << 6 | digit) & 0xffff, have + 6);
        if have >= 8 {
            have -= 8;
            bytes.push(u8::try_from((bits >> have) & 0xff).unwrap());
        }
    }
    bytes
}
