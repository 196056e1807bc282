// A panel of nothing but parts (controls.js).
export default jvLive(({ model, el }) => jvParts(model, el));
