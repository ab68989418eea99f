// Loaded into the Node programs of tests: a program that connects anywhere but to this machine ends at once.
const net = require("node:net");

const connect = net.Socket.prototype.connect;
net.Socket.prototype.connect = function (...args) {
  const [options] = Array.isArray(args[0]) ? args[0] : args;
  const host = typeof options === "object" ? (options.host ?? "127.0.0.1") : (args[1] ?? "127.0.0.1");
  if (!["127.0.0.1", "localhost"].includes(host)) {
    require("node:fs").writeSync(2, `this program connects to ${host}\n`);
    process.exit(70);
  }
  return connect.apply(this, args);
};
